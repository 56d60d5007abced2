"""The HTML page of report.py about training runs.

`curves` reads metrics.jsonl, `pictures` reads samples/, and `runs` reads the rest of a run folder; `page` writes them
into one file, and `watching` serves it during a run. The page's own HTML, CSS and JavaScript are in the folder `page`.
"""
