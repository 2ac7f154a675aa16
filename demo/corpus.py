"""The text: the Python standard library's own source, and a byte-pair encoding trained on it.

Every Python installation carries this text, so nothing is downloaded. Another Python version carries another text, hence other
tokens and other digests; within one version all is reproducible. `Corpus.sha256` says which text it was.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT_BYTES = 2_000_000  # stop after the file that reaches this


@dataclass
class Corpus:
    files: int
    sha256: str  # of the text
    tokens: torch.Tensor  # int64 [T]
    tokenizer: Tokenizer


def standard_library_text() -> "list[str]":
    """The top-level modules in order of their names, up to TEXT_BYTES. Packages, tests and site-packages are left out, and so is
    `_sysconfigdata*`, which names the folders of the machine that Python was built on."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts, size = [], 0
    for path in sorted(folder.glob("*.py"), key=lambda p: p.name):
        if path.name.startswith("_sysconfigdata"):
            continue
        texts.append(path.read_text(encoding="utf-8"))
        size += len(texts[-1].encode())
        if size >= TEXT_BYTES:
            break
    if size < TEXT_BYTES // 4:
        raise SystemExit("The demo learns from the standard library's .py files, and this Python has none that it can read.")
    return texts


def load(vocabulary: int) -> Corpus:
    texts = standard_library_text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise SystemExit(f"The tokenizer has {tokenizer.get_vocab_size()} tokens instead of {vocabulary}: the text is too short.")
    ids = [token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids]
    return Corpus(len(texts), hashlib.sha256("".join(texts).encode()).hexdigest(), torch.tensor(ids), tokenizer)


def batches(tokens: torch.Tensor, steps: int, rows: int, length: int, seed: int) -> torch.Tensor:
    """[steps, rows, length + 1] windows of the text; each window is inputs and, one further, targets."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - length, (steps, rows, 1), generator=generator)
    return tokens[starts + torch.arange(length + 1)]
