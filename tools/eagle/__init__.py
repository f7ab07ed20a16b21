"""Trains the EAGLE-3 head that ships with breakeven: prompts, generate, train, eval.

Runs by hand on one GPU (or, with ``--smoke``, on a CPU in seconds); no serving process imports it. Floor F3.
One command per stage, each reading the file the stage before it wrote:

    prompts -> prompts.jsonl.gz -> generate -> tokens-*.npz -> train -> a head folder -> eval -> report.json

docs/training.md tells the whole recipe and what it gave.
"""

__all__: list[str] = []
