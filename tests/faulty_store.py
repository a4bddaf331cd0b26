"""A bucket in a folder, through fsspec, that is slow, fails or damages what it is told to."""

import time
from typing import ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyStore(LocalFileSystem):
    """`faulty:///folder`. Each failing entry is raised once, by the call of that name."""

    protocol = "faulty"
    cachable = False
    failing: ClassVar[list[tuple[str, Exception]]] = []
    asked: ClassVar[list[tuple[str, str]]] = []
    seconds: ClassVar[float] = 0.0

    def ask(self, call, path):
        self.asked.append((call, str(path)))
        time.sleep(self.seconds)
        for fault in self.failing:
            if fault[0] == call:
                self.failing.remove(fault)
                raise fault[1]

    def cat_file(self, path, *arguments, **options):
        self.ask("cat_file", path)
        return super().cat_file(path, *arguments, **options)

    def get_file(self, path, local, *arguments, **options):
        self.ask("get_file", path)
        return super().get_file(path, local, *arguments, **options)

    def put_file(self, local, path, *arguments, **options):
        self.ask("put_file", path)
        return super().put_file(local, path, *arguments, **options)


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
