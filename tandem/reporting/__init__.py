"""The HTML page about runs that report.py makes from their folders.

`curves` reads metrics.jsonl, `pictures` samples/, `runs` the rest of a run folder; `page` writes one file of them, and
`watching` serves it during a run. The page's own HTML, CSS and JavaScript are in the folder `page`.
"""
