"""A batch that moves itself, as a tokenizer of transformers gives it."""

from collections import UserDict
from typing import Any


class Encoding(UserDict):
    """As transformers' `BatchEncoding`: a mapping whose `to` moves in place and returns the encoding itself."""

    def __init__(self, data: dict[str, Any] | None = None, n_sequences: int | None = None):
        super().__init__(data)
        self.n_sequences = n_sequences

    def to(self, device: Any, *, non_blocking: bool = False) -> "Encoding":
        self.data = {name: value.to(device, non_blocking=non_blocking) for name, value in self.data.items()}
        return self
