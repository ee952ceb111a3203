"""A store that lies nowhere."""


class MemoryStore:
    """A store of what it is given: bytes by key."""

    def __init__(self, files: dict[str, bytes]):
        self.files = files

    def keys(self) -> list[str]:
        return sorted(self.files)

    def read(self, key: str) -> bytes:
        return self.files[key]
