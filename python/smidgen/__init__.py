"""Fine-tuning of large language models in a smidgen of memory.

    import smidgen

    recipe = dict(model="hf:Qwen/Qwen2.5-0.5B-Instruct", adapter={"rank": 16}, output="runs/first")
    print(smidgen.plan(**recipe, memory={"budget": "6GiB"}))
    run = smidgen.train(**recipe, data=[{"prompt": "2 + 2 =", "response": "4"}], train={"epochs": 3})
    with smidgen.load(run) as session:
        print(session.generate("2 + 2 ="))

A recipe is the path of a TOML file, or keyword arguments with the names of its sections. `model`, `data` and `output` may
be the one value that matters: the model's path, the rows, the folder of the run. `smidgen.schema()` lists every key.
"""

from ._errors import Error, Interrupted
from ._program import schema, version
from ._runs import Plan, Run, plan, report, resume, train
from ._sessions import Answer, Session, load

__version__ = version()
__all__ = [
    "Answer", "Error", "Interrupted", "Plan", "Run", "Session", "load", "plan", "report", "resume", "schema", "train",
    "version",
]
