from __future__ import annotations

from weightd.core.layout.packing import packed


def test_the_shortest_form_of_each_value_on_every_machine() -> None:
    assert bytes.fromhex("82 a177 92 05 cd0100 a173 c4 02 ffff") == packed({"w": (5, 256), "s": b"\xff\xff"})
    assert bytes.fromhex("93 c0 ff c3") == packed([None, -1, True])
