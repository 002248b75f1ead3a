"""The package over the installed program: a tiny model of random weights, trained on a CPU.

    python python/tests/test_smidgen.py
"""

import json
import math
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import smidgen

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"{number} and one is ", "completion": str(number + 1)} for number in range(8)]
MEMORY = {"device": "cpu", "budget": "96MiB", "threads": 2}


def tiny_model(folder: Path) -> Path:
    """A llama of two layers with random weights and the vocabulary of a tokenizer of bytes."""
    model = folder / "model"
    model.mkdir()
    for file in (ROOT / "fixtures/sft/byte_level").iterdir():
        shutil.copy(file, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    vocabulary, hidden, width, layers = max(ids) + 1, 32, 64, 2
    (model / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": width, "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "float32",
    }))
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 2, hidden), "self_attn.v_proj": (hidden // 2, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    random_numbers, header, data = random.Random(7), {}, b""
    for name, shape in shapes.items():
        count = math.prod(shape)
        values = [1.0] * count if len(shape) == 1 else [random_numbers.gauss(0, 0.1) for _ in range(count)]
        start, data = len(data), data + struct.pack(f"<{count}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return model


class InAFolder(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp()).resolve()
        # A run that ends by itself may still write.
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        self.recipe = dict(
            model=tiny_model(self.folder), adapter={"rank": 4}, train={"batch": 4, "steps": 4, "lr": 1e-2}, memory=MEMORY,
        )


class Plans(InAFolder):
    def test_a_plan_adds_up_and_shows_its_table(self):
        plan = smidgen.plan(**self.recipe, data={"max_tokens": 64})
        self.assertTrue(plan.fits)
        self.assertEqual(sum(plan.rows.values()), plan.peak_bytes)
        self.assertIn("peak", str(plan))
        self.assertIn("<pre>", plan._repr_html_())
        self.assertIn("fits", repr(plan))

    def test_a_plan_that_does_not_fit_has_advice(self):
        plan = smidgen.plan(**{**self.recipe, "memory": {"device": "cpu", "budget": "1MiB"}}, data={"max_tokens": 64})
        self.assertFalse(plan.fits)
        self.assertGreater(plan.peak_bytes, plan.budget_bytes)

    def test_a_file_and_changes_to_it(self):
        text = f"[model]\npath = {json.dumps(str(self.recipe['model']))}\n[adapter]\nrank = 4\n[data]\ntrain = 'x.jsonl'\n[output]\ndir = 'run'\n"
        Path("recipe.toml").write_text(text)
        one = smidgen.plan("recipe.toml", memory=MEMORY, data={"max_tokens": 64})
        other = smidgen.plan("recipe.toml", adapter={"rank": 16}, memory=MEMORY, data={"max_tokens": 64})
        self.assertGreater(other.rows["optimizer"], one.rows["optimizer"])

    def test_mistakes_are_the_programs_own(self):
        with self.assertRaises(smidgen.Error) as raised:
            smidgen.plan(**{**self.recipe, "adapter": {"rnak": 4}})
        self.assertIn("rnak", raised.exception.message)
        self.assertFalse(raised.exception.message.startswith("error:"))
        self.assertTrue(any("rank" in hint for hint in raised.exception.hints), raised.exception.hints)
        self.assertEqual(raised.exception.exit_code, 2)
        with self.assertRaises(TypeError):
            smidgen.plan(modle="model")
        with self.assertRaises(TypeError):
            smidgen.plan(**{**self.recipe, "adapter": 4})

    def test_the_schema_has_every_section(self):
        properties = smidgen.schema()["properties"]
        self.assertLessEqual({"model", "adapter", "data", "train", "memory", "output"}, set(properties))


class Runs(InAFolder):
    def test_rows_are_learned_and_the_adapter_answers(self):
        rows = []
        run = smidgen.train(**self.recipe, data=ROWS, output="runs/one", on_step=rows.append, quiet=True)
        self.assertEqual([row["step"] for row in rows], [1, 2, 3, 4])
        self.assertEqual(run.losses, [row["loss"] for row in rows])
        self.assertEqual((run.steps, run.folder), (4, self.folder / "runs/one"))
        self.assertTrue((run.adapter / "adapter_model.safetensors").is_file())
        self.assertIn("<iframe", run._repr_html_())
        # What was trained on is kept, so that the run can be resumed.
        kept = (self.folder / "runs/one.train.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line) for line in kept], ROWS)
        self.assertEqual(smidgen.report("runs/one").steps, 4)

        with smidgen.load(run, device="cpu", threads=2) as session:
            pieces = []
            answer = session.generate("3 and one is ", max_new_tokens=8, on_text=pieces.append)
            self.assertEqual("".join(pieces), answer)
            self.assertLessEqual(answer.tokens, 8)
            self.assertIn(answer.finish_reason, ("stop", "length"))
            self.assertEqual(answer, session.generate("3 and one is ", max_new_tokens=8))
            self.assertEqual(session.model, "one")
            self.assertEqual(session.models[0], "model")
            with self.assertRaises(smidgen.Error) as raised:
                session.generate("x", temperature=-1)
            self.assertIn("temperature", str(raised.exception))
        with self.assertRaises(smidgen.Error):
            session.generate("x")

    def test_the_same_rows_from_a_file_give_the_same_losses(self):
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        one = smidgen.train(**self.recipe, data=iter(ROWS), output="one", quiet=True)
        other = smidgen.train(**self.recipe, data="rows.jsonl", output="other", quiet=True)
        self.assertEqual(one.losses, other.losses)

    def test_on_step_stops_a_run_that_then_goes_on(self):
        recipe = {**self.recipe, "train": {"batch": 4, "steps": 400, "lr": 1e-3}}
        whole = smidgen.train(**recipe, data=ROWS, output="whole", quiet=True)
        with self.assertRaises(smidgen.Interrupted):
            smidgen.train(**recipe, data=ROWS, output="run", on_step=lambda row: row["step"] < 2, quiet=True)
        self.assertLess(smidgen.report("run").steps, 400)
        run = smidgen.resume("run", quiet=True)
        self.assertEqual(run.losses, whole.losses)

    def test_what_on_step_raises_arrives_after_the_state_was_saved(self):
        class Mine(Exception):
            pass

        def fail(row):
            raise Mine

        recipe = {**self.recipe, "train": {"batch": 4, "steps": 400, "lr": 1e-3}}
        with self.assertRaises(Mine):
            smidgen.train(**recipe, data=ROWS, output="run", on_step=fail, quiet=True)
        self.assertLess(smidgen.report("run").steps, 400)
        self.assertEqual(smidgen.resume("run", quiet=True).steps, 400)

    @unittest.skipUnless(threading.current_thread() is threading.main_thread(), "signals arrive in the main thread")
    def test_ctrl_c_saves_and_raises(self):
        # Python leaves it ignored where it was, as in background jobs of scripts.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))

        def press(row):
            if row["step"] == 1:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

        recipe = {**self.recipe, "train": {"batch": 4, "steps": 100_000, "lr": 1e-3}}
        with self.assertRaises(KeyboardInterrupt):
            smidgen.train(**recipe, data=ROWS, output="run", on_step=press, quiet=True)
        self.assertTrue(list(Path("run").glob("checkpoint-*")))

    def test_a_run_ends_when_nobody_follows_it(self):
        recipe = {**self.recipe, "train": {"batch": 4, "steps": 100_000, "lr": 1e-3}}
        child = os.fork()
        if child == 0:
            smidgen.train(**recipe, data=ROWS, output="run", quiet=True,
                          on_step=lambda row: os.kill(os.getpid(), signal.SIGKILL))
        os.waitpid(child, 0)
        until = time.monotonic() + 60
        while not list(Path("run").glob("checkpoint-*")) and time.monotonic() < until:
            time.sleep(0.05)
        self.assertTrue(list(Path("run").glob("checkpoint-*")))

    def test_bad_rows_are_named(self):
        with self.assertRaises(TypeError):
            smidgen.train(**self.recipe, data=["not", 1], output="run")
        with self.assertRaises(ValueError):
            smidgen.train(**self.recipe, data=[], output="run")
        with self.assertRaises(smidgen.Error):
            smidgen.train(**self.recipe, data=[{"neither": "nor"}], output="run", quiet=True)
        with self.assertRaises(TypeError):
            smidgen.train(**self.recipe, data=ROWS)


class Rewards(InAFolder):
    def setUp(self):
        super().setUp()
        self.recipe["train"] = {
            "objective": "grpo", "batch": 2, "steps": 2, "num_generations": 2, "max_completion_length": 4, "lr": 1e-3,
        }
        self.prompts = [{"prompt": f"{number} and one is ", "answer": str(number + 1)} for number in range(4)]

    def test_functions_score_answers(self):
        seen = []

        def longer_is_better(answer):
            seen.append(answer)
            return len(answer["completion"])

        run = smidgen.train(**self.recipe, data=self.prompts, output="run", rewards=[longer_is_better], quiet=True)
        self.assertEqual(len(seen), 8)
        self.assertIn(seen[0]["row"]["answer"], "1234")
        rewards = [json.loads(line)["reward"] for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
        self.assertEqual(rewards, [len(answer["completion"]) for answer in seen])

    def test_what_a_function_raises_arrives(self):
        class Mine(Exception):
            pass

        def fail(answer):
            raise Mine

        with self.assertRaises(Mine):
            smidgen.train(**self.recipe, data=self.prompts, output="run", rewards=[fail], quiet=True)
        run = smidgen.resume("run", rewards=[lambda answer: len(answer["completion"])], quiet=True)
        self.assertEqual(run.steps, 2)


class Notebooks(InAFolder):
    def test_every_notebook_of_the_examples_runs(self):
        notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
        self.assertTrue(notebooks)
        os.environ["SMIDGEN_EXAMPLE_MODEL"] = str(self.recipe["model"])
        self.addCleanup(os.environ.pop, "SMIDGEN_EXAMPLE_MODEL")
        for notebook in notebooks:
            cells = json.loads(notebook.read_text())["cells"]
            names = {}
            for number, cell in enumerate(cells):
                if cell["cell_type"] == "code":
                    exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[1:]])
