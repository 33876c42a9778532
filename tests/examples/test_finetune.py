"""The demo: its data, labels, loss and figures one by one, then the whole of it on two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("tokenizers", reason="the demo's packages are an extra: pip install 'odb[demo]'")
pytest.importorskip("rich", reason="the demo's packages are an extra: pip install 'odb[demo]'")
pytest.importorskip("matplotlib", reason="the demo's packages are an extra: pip install 'odb[demo]'")

from finetuning import corpus, encoding, methods, metrics
from finetuning.model import ModelConfig, Transformer

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
import os

def add(a, b: int = 1, *, c=None) -> int:
    """Adds two numbers, and a third where given."""
    # the usual case first
    if c is None:
        return a + b
    return a + b + c

def undocumented(a):
    return a

class Box:
    async def fetch(self, /, key):
        """Fetches what lies under the key."""
        return await self.store[key]

def nothing():
    """Says much about a body that is not there."""
'''


def conversation(*contents: str) -> corpus.Conversation:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [conversation(f"how is {i} written in words?", f"in words it is number {i * i}") for i in range(50)]
    return encoding.load_tokenizer(texts, 400, tmp_path_factory.mktemp("cache"))


# ---- corpus


def test_functions_become_signature_docstring_and_body(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    found = list(corpus.extract_stdlib(tmp_path))
    assert [[m["role"] for m in c] for c in found] == [["user", "assistant"]] * 2
    assert found[0][0]["content"] == (
        "def add(a, b: int=1, *, c=None) -> int:\nAdds two numbers, and a third where given."
    )
    assert found[0][1]["content"].startswith("# the usual case first\nif c is None:\n    return a + b\nreturn")
    assert found[1][0]["content"].startswith("async def fetch(self, /, key):\n")


def test_extraction_is_deterministic_without_tests_and_duplicates(tmp_path):
    (tmp_path / "b.py").write_text(MODULE)
    (tmp_path / "a.py").write_text(MODULE.replace("add", "plus"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text(MODULE.replace("add", "tested"))
    found = list(corpus.extract_stdlib(tmp_path))
    assert found == list(corpus.extract_stdlib(tmp_path))
    names = [c[0]["content"].split("(")[0] for c in found]
    assert names == ["def plus", "async def fetch", "def add"]


@pytest.mark.timeout(120)
def test_standard_library_is_a_corpus_and_is_cached(tmp_path):
    first = corpus.stdlib_conversations(tmp_path)
    (cached,) = tmp_path.iterdir()
    cached.write_text("".join(cached.read_text().splitlines(keepends=True)[:100]))
    assert len(first) > 3000
    assert corpus.stdlib_conversations(tmp_path) == first[:100]


def test_split_depends_on_content_alone():
    all_of_it = [conversation(f"question {i}", f"answer {i}") for i in range(100)]
    train, heldout = corpus.split(all_of_it, 1000, 8)
    assert (len(train), len(heldout)) == (92, 8)
    assert corpus.split(all_of_it[::-1], 1000, 8) == (train, heldout)
    assert corpus.split(all_of_it, 5, 8) == (train[:5], heldout)


# ---- JSONL

GOOD = json.dumps({"messages": conversation("a", "b")})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", 'line 2: no list under "messages"'),
        ('{"messages": []}', 'line 2: no list under "messages"'),
        ('{"messages": ["a"]}', "line 2, message 0: str where an object"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "message 0: role 'bot'; expected one of system, user"),
        ('{"messages": [{"role": "user", "content": 1}]}', "message 0: content is int; expected a string"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2: no assistant message"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(corpus.DataError) as caught:
        corpus.read_jsonl(path)
    assert complaint in str(caught.value)


def test_jsonl_of_several_turns_is_read_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "data.jsonl"
    turns = [{"role": "system", "content": "be brief\u2028"}, *conversation("a", "b", "c", "d")]
    path.write_text(GOOD + "\n\n" + json.dumps({"messages": turns}, ensure_ascii=False) + "\n")
    assert corpus.read_jsonl(path) == [conversation("a", "b"), turns]


def test_too_little_or_no_data_is_said(tmp_path):
    with pytest.raises(corpus.DataError, match="can't be read"):
        corpus.read_jsonl(tmp_path / "missing.jsonl")
    (tmp_path / "one.jsonl").write_text(GOOD)
    with pytest.raises(corpus.DataError, match="1 conversations"):
        corpus.read_jsonl(tmp_path / "one.jsonl")


# ---- encoding


def test_round_trip_of_any_text(tokenizer):
    talk = conversation("wörds 数 \x00 <|end|>", "<|user|> answers\n\twith tabs")
    ids, _ = encoding.encode(talk, tokenizer)
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in talk)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [i for i in ids if i < len(encoding.SPECIAL_TOKENS)] == [3, 1, 4, 1]  # spelled ones are plain text


def test_labels_are_exactly_the_answers_and_their_ends(tokenizer):
    ids, labels = encoding.encode(conversation("how is it", "number 1", "and then?", "number 2"), tokenizer)
    expected = []
    for i, text in enumerate(("how is it", "number 1", "and then?", "number 2")):
        tokens = [*tokenizer.encode(text).ids, 1]
        expected += [-100, *(tokens if i % 2 else [-100] * len(tokens))]
    assert labels == expected
    assert all(label in (-100, token) for label, token in zip(labels, ids, strict=True))


def test_cuts_depend_on_seed_epoch_and_index_alone(tokenizer):
    talks = [conversation(f"how is {i} written?", "number " * 30) for i in range(64)]
    data = encoding.ChatDataset(talks, tokenizer, 50, seed=3, augment=True)
    again = encoding.ChatDataset(talks, tokenizer, 50, seed=3, augment=True)
    lengths = [len(data[i]["input_ids"]) for i in range(64)]
    assert [len(again[i]["input_ids"]) for i in reversed(range(64))] == lengths[::-1]
    assert max(lengths) <= 50 and len(set(lengths)) > 10
    data.set_epoch(1)
    assert [len(data[i]["input_ids"]) for i in range(64)] != lengths


def test_collate_pads_on_the_right(tokenizer):
    samples = [
        {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([-100, 6])},
        {"input_ids": torch.tensor([7]), "labels": torch.tensor([7])},
    ]
    batch = encoding.collate(samples)
    assert batch["input_ids"].tolist() == [[5, 6], [7, 0]]
    assert batch["labels"].tolist() == [[-100, 6], [7, -100]]
    assert encoding.row_lengths(batch["input_ids"]).tolist() == [2, 1]


# ---- model


def test_loss_is_the_mean_cross_entropy_of_the_next_tokens():
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=11, width=16))
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
    labels = torch.tensor([[1, -100, 3, 4], [-100, 6, 7, -100]])  # a row's first label bears no loss
    out = model(ids, labels)
    log_p = F.log_softmax(out.logits, dim=-1)
    by_hand = -(log_p[0, 1, 3] + log_p[0, 2, 4] + log_p[1, 0, 6] + log_p[1, 1, 7]) / 4
    torch.testing.assert_close(out.loss, by_hand)


def test_no_label_gives_zero_loss_and_zero_gradient():
    model = Transformer(ModelConfig(vocab_size=11, width=16))
    loss = model(torch.tensor([[1, 2]]), torch.tensor([[1, -100]])).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(float(p.grad.abs().sum()) == 0.0 for p in model.parameters())


def test_padding_on_the_right_changes_nothing():
    model = Transformer(ModelConfig(vocab_size=11, width=16))
    short, padded = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3, 0, 0]])
    torch.testing.assert_close(model(padded).logits[:, :3], model(short).logits)


# ---- batches and figures


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dealing_loses_nothing_and_keeps_steps_equal(world_size):
    steps = methods.chunks(np.random.default_rng(0).permutation(20), 3 * world_size)
    shares = [methods.deal(steps, rank, world_size) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(i for share in shares for rows in share for i in rows) == list(range(20))


def test_figures_of_hand_made_numbers():
    logs = [
        metrics.RankLog(padded_tokens=[8, 6], lengths=[[4, 3], [6]], optimizer_steps=1, checksum=5, wait_seconds=0.5),
        metrics.RankLog(padded_tokens=[4, 0], lengths=[[4], []], optimizer_steps=1, checksum=6),
    ]
    curve = [metrics.LossPoint(0, 0.0, 3.0), metrics.LossPoint(4, 2.0, 1.5)]
    figures = metrics.summarize("some", logs, curve, prepass_seconds=2.0)
    assert figures.padding == pytest.approx(1 - 17 / 18)
    assert figures.step_efficiency == pytest.approx(17 / (2 * (8 + 6)))
    assert (figures.samples, figures.batches, figures.idle_steps, figures.peak_padded_tokens) == (4, 2, 1, 8)
    assert (figures.samples_per_second, figures.samples_per_second_with_prepass) == (2.0, 1.0)
    assert (figures.real_tokens_per_second, figures.heldout_loss, figures.checksum) == (8.5, 1.5, 11)


def test_shape_of_lengths():
    shape = metrics.describe_lengths([1, 1, 1, 5])
    assert (shape.count, shape.mean, shape.p50, shape.longest) == (4, 2.0, 1.0, 5)
    assert shape.cv == pytest.approx(3**0.5 / 2)


# ---- all of it


def run_demo(tmp_path: Path, *arguments: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *launch, str(ROOT / "examples" / "finetune.py"), "--quick", *arguments]
    paths = ["--output", str(tmp_path / "out"), "--cache-dir", str(tmp_path / "cache")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's children as well
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def write_chats(path: Path, count: int) -> None:
    lines = [conversation(f"say {i}", f"{i} is a number. " * (1 + i % 23)) for i in range(count)]
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))


@pytest.mark.timeout(180)
def test_two_ranks_train_on_the_same_tokens_with_every_method(tmp_path):
    write_chats(tmp_path / "chats.jsonl", 135)
    done = run_demo(tmp_path, "--data", str(tmp_path / "chats.jsonl"), "--epochs", "2", "--width", "32")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    runs = {run["method"]: run for run in results["runs"]}
    assert list(runs) == ["fixed", "sorted", "odb"]
    assert {run["samples"] for run in runs.values()} == {2 * 122}  # 13 of 135 are held out
    assert len({(run["checksum"], run["real_tokens"]) for run in runs.values()}) == 1
    for run in runs.values():
        assert run["peak_padded_tokens"] <= 1024
        assert run["heldout_loss"] < run["curve"][0]["loss"] - 0.3
        assert len({len(padded) for padded in run["padded_tokens_per_rank"]}) == 1
    assert runs["odb"]["step_efficiency"] > runs["fixed"]["step_efficiency"]
    assert runs["sorted"]["prepass_seconds"] > 0 == runs["odb"]["prepass_seconds"]
    assert (tmp_path / "out" / "finetune.png").stat().st_size > 10_000
    assert "checksums are equal" in done.stdout


@pytest.mark.timeout(180)
def test_wrong_data_ends_every_rank_with_one_message(tmp_path):
    (tmp_path / "chats.jsonl").write_text(GOOD + "\nnot json\n")
    done = run_demo(tmp_path, "--data", str(tmp_path / "chats.jsonl"))
    assert done.returncode != 0
    assert done.stderr.count("chats.jsonl, line 2: not JSON") == 1
