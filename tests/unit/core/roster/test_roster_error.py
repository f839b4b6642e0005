from weightd.core.roster.roster_error import nodes_text, slots_text


def test_named_slots_are_cut_and_numbers_are_not() -> None:
    names = [f"gpu-{i}" for i in range(10)]

    assert slots_text(names) == "gpu-0, gpu-1, gpu-2, gpu-3, gpu-4, gpu-5, gpu-6, gpu-7, 2 more"
    assert slots_text(names[:9]).endswith("gpu-7, 1 more")
    assert slots_text(names[:8]).endswith("gpu-7")
    assert slots_text([*range(0, 40, 2), "a"]).startswith("0, 2, 4")
    assert slots_text([*range(0, 40, 2), "a"]).endswith("38, a")


def test_nodes_are_cut() -> None:
    ranks = {f"n{i}": (i,) for i in range(11)}

    assert nodes_text(ranks).endswith("n7: 7; 3 more nodes")
    assert nodes_text(dict(list(ranks.items())[:9])).endswith("n7: 7; 1 more node")
    assert "more" not in nodes_text({f"n{i}": (i,) for i in range(8)})
