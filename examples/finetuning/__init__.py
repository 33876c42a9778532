"""The parts of `examples/finetune.py`, in the order in which data flows through them.

corpus.py     conversations: the standard library's functions, or the user's JSONL
encoding.py   chat template, BPE tokenizer, labels, random truncation; the dataset that the workers run
model.py      a small decoder-only transformer
methods.py    fixed batches, sorted batches and `odb`, behind one interface
train.py      the training loop and the held-out loss
metrics.py    what was observed: records and the figures made from them
progress.py   live progress
report.py     the table, the PNG, the JSON
"""
