"""An HTML page about runs, made from their folders alone: what report.py at the top of the repository writes.

`curves` reads metrics.jsonl, `pictures` samples/, `runs` the rest of a run folder; `page` puts them into one file, and
`watching` serves it while a run goes on. The page's own HTML, CSS and JavaScript are in the folder `page`.
"""
