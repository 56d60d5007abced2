"""Reading files from anywhere: no code in them is run, and no number in them takes memory that they do not show."""
