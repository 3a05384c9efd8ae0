import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from paged_jax.block_manager import BlockManager
from paged_jax.memory_report import MemoryReport, format_bytes
from paged_jax.pool_picture import draw_pool
from paged_jax.pool_snapshot import BlockStates, Owner, PoolSnapshot, printable, snapshot
from paged_jax.request import Request
from paged_jax.sampling_params import SamplingParams

SVG = "{http://www.w3.org/2000/svg}"
BLOCK_BYTES = 3 * 2**20


def make_request(name: str, token_ids: list[int]) -> Request:
    return Request(name, token_ids, SamplingParams(max_tokens=1000), max_model_len=100_000)


def admit(manager: BlockManager, request: Request) -> Request:
    """Admits a request, and lets the step pass that computes its tokens."""
    assert manager.allocate(request)
    manager.cache_full_blocks(request, request.num_tokens)
    manager.take_moves()
    request.num_computed_tokens = request.num_tokens
    return request


def chats(num_chats: int, num_blocks: int, **options) -> tuple[BlockManager, list[Request]]:
    """Chats of a system prompt of 1,000 tokens and one token of their own."""
    manager = BlockManager(num_blocks, 16, **options)
    system = list(range(1000))
    names = [f"chat-{i}" for i in range(num_chats)]
    live = [admit(manager, make_request(n, [*system, 5000 + i])) for i, n in enumerate(names)]
    return manager, live


def by_hand(num_blocks: int, **states) -> BlockStates:
    fields = {
        "ref_counts": np.zeros(num_blocks, np.int32),
        "is_hashed": np.zeros(num_blocks, bool),
        "is_pinned": np.zeros(num_blocks, bool),
        "owner": np.full(num_blocks, -1, np.int32),
        "num_tokens": np.zeros(num_blocks, np.int32),
    }
    return BlockStates(**{**fields, **states})


def cells_of(svg: str) -> dict[int, ElementTree.Element]:
    cells = [e for e in ElementTree.fromstring(svg).iter(f"{SVG}rect") if "data-cell" in e.attrib]
    assert all(len(list(cell.iter(f"{SVG}title"))) == 1 for cell in cells)
    return {int(cell.attrib["data-cell"]): cell for cell in cells}


def title_of(cell: ElementTree.Element) -> str:
    return cell[0].text or ""


def fills_of(svg: str) -> dict[int, str]:
    """The colour of each cell, which its group carries."""
    root = ElementTree.fromstring(svg)
    groups = [g for g in root.iter(f"{SVG}g") if "fill" in g.attrib]
    return {int(cell.attrib["data-cell"]): g.attrib["fill"] for g in groups for cell in g}


def marked(svg: str, attribute: str) -> list[int]:
    root = ElementTree.fromstring(svg)
    return sorted(int(e.attrib[attribute]) for e in root.iter() if attribute in e.attrib)


def test_fifty_chats_hold_112_blocks_and_sharing_saves_3038_copies():
    report = MemoryReport(snapshot(*chats(50, 200)), BLOCK_BYTES, weights_bytes=2**30)
    device = report.pool.device
    assert (device.num_used_blocks, device.num_shared_blocks) == (112, 62)
    assert device.num_copies_saved == 3150 - 112
    assert report.bytes_saved_by_sharing == 3038 * BLOCK_BYTES
    assert report.num_tokens == 992 + 50 * 9
    assert report.usage == 112 / 199
    text = str(report)
    for pattern in (
        r"KV in use +336\.00 MiB +\d+\.\d% +112 blocks",
        r"weights +1\.00 GiB",
        r"in use +56\.3%: 1,442 tokens in 1,792 slots \(80\.5% filled\)",
        r"shared +62 blocks; sharing saves 3,038 copies, 8\.90 GiB",
        r"chat-0 +waiting +63 +62 +1,001",
        r"and 40 more",
    ):
        assert re.search(pattern, text), pattern


def test_every_byte_has_one_owner():
    manager, live = chats(8, 400, num_host_blocks=90)
    for name, start in (("old", 20_000), ("older", 30_000)):
        manager.free(admit(manager, make_request(name, list(range(start, start + 500)))))
    assert manager.swap_out(live[2])
    manager.take_moves()
    report = MemoryReport(
        snapshot(manager, live),
        BLOCK_BYTES,
        weights_bytes=12345,
        temporary_bytes=678,
        host_block_bytes=1000,
    )
    owners = report.memory_bytes
    assert min(owners.values()) >= 0
    assert sum(n for name, n in owners.items() if name.startswith("kv_")) == 400 * BLOCK_BYTES
    assert sum(n for name, n in owners.items() if name.startswith("swap_")) == 91 * 1000
    assert (owners["weights"], owners["temporary"]) == (12345, 678)
    assert owners["kv_in_use"] == manager.pool.num_used_blocks * BLOCK_BYTES
    # 31 full blocks of each of the two that have ended are cached.
    assert owners["kv_cached"] == 62 * BLOCK_BYTES
    assert owners["swap_in_use"] == 63 * 1000
    [swapped] = [owner for owner in report.pool.owners if owner.status == "swapped"]
    assert (swapped.request_id, swapped.num_blocks, swapped.num_host_blocks) == ("chat-2", 0, 63)
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%", str(report).split("KV pool")[0])]
    assert sum(shares) == pytest.approx(200, abs=0.5)  # 100 of the device, 100 of the host


def test_the_states_of_blocks_are_those_of_pool_and_tables():
    manager = BlockManager(40, 16)
    first = admit(manager, make_request("a", list(range(40))))
    fork = make_request("a/1", [*range(40), 7])
    manager.fork(first, fork)
    states = snapshot(manager, [first, fork]).device
    table = list(first.block_ids)
    assert states.num_holders[table].tolist() == [2, 2, 2]
    assert states.num_tokens[table].tolist() == [16, 16, 8]
    assert states.is_hashed[table].tolist() == [True, True, False]
    assert states.owner[table].tolist() == [0, 0, 0]
    owners = snapshot(manager, [first, fork]).owners
    assert [owner.group for owner in owners] == ["a", "a"]
    assert [owner.num_shared_blocks for owner in owners] == [3, 3]
    # Of a sequence that is not named, its blocks are known to be in use all the same.
    manager.free(fork)
    unknown = snapshot(manager, []).device
    assert (unknown.num_used_blocks, unknown.owner.max()) == (3, -1)
    assert "holder not listed" in title_of(cells_of(draw_pool(snapshot(manager, [])))[table[0]])


def test_a_pin_is_no_holder_but_keeps_a_block_in_use():
    manager = BlockManager(40, 16)
    request = admit(manager, make_request("a", list(range(70))))
    manager.pins.pin(request.block_hashes[:2], num_blocks_to_spare=10)
    pinned = list(request.block_ids)[:2]
    report = MemoryReport(snapshot(manager, [request]), BLOCK_BYTES)
    assert report.num_pinned_blocks == 2
    assert report.pool.device.num_shared_blocks == 0
    assert marked(report.svg(), "data-pinned") == sorted(pinned)
    manager.free(request)
    report = MemoryReport(snapshot(manager, []), BLOCK_BYTES)
    device = report.pool.device
    assert (device.num_used_blocks, device.num_cached_blocks) == (2, 2)
    cells = cells_of(report.svg())
    assert "pinned, held by no sequence" in title_of(cells[pinned[0]])


def test_the_picture_has_a_cell_for_every_block_and_marks_the_shared_ones():
    manager, live = chats(5, 200)
    svg = draw_pool(snapshot(manager, live))
    cells = cells_of(svg)
    assert sorted(cells) == list(range(200))
    corners = {(cell.attrib["x"], cell.attrib["y"]) for cell in cells.values()}
    assert len(corners) == 200
    shared = [i for i, count in enumerate(manager.pool.ref_counts) if count > 1]
    assert len(shared) == 62 and marked(svg, "data-shared") == shared
    numbers = [
        e for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if "data-shared" in e.attrib
    ]
    assert {number.text for number in numbers} == {"5"}
    assert title_of(cells[0]).startswith("block 0: the null block")
    assert title_of(cells[1]) == "block 1: chat-0 and 4 more, 5 holders, 16 of 16 tokens"
    tail = live[3].block_ids[-1]
    assert title_of(cells[tail]) == f"block {tail}: chat-3, 1 holder, 9 of 16 tokens"
    assert title_of(cells[199]) == "block 199: free"
    fills = fills_of(svg)
    assert len({fills[r.block_ids[-1]] for r in live}) == 5  # a colour for each
    assert fills[199] not in {fills[r.block_ids[-1]] for r in live}


def test_host_blocks_are_drawn_below_where_there_are_any():
    manager, live = chats(2, 200, num_host_blocks=70)
    assert "Host memory" not in draw_pool(snapshot(chats(2, 200)[0], live))
    assert manager.swap_out(live[1])
    manager.take_moves()
    svg = draw_pool(snapshot(manager, live))
    assert "Host memory: 70 blocks of 16 tokens, 90.0% in use" in svg
    root = ElementTree.fromstring(svg)
    cells = [e for e in root.iter(f"{SVG}rect") if "data-cell" in e.attrib]
    assert len(cells) == 200 + 71
    assert sum("chat-1, 1 holder" in title_of(cell) for cell in cells) == 63


@pytest.mark.parametrize(
    "num_blocks, num_cells", [(4096, 4096), (4097, 2049), (5000, 2500), (100_000, 4000)]
)
def test_a_large_pool_has_several_blocks_a_cell(num_blocks, num_cells):
    svg = draw_pool(PoolSnapshot(16, by_hand(num_blocks), None, ()))
    assert len(cells_of(svg)) == num_cells
    per_cell = -(-num_blocks // num_cells)
    assert (f"a cell is {per_cell} blocks" in svg) == (per_cell > 1)


def test_a_cell_of_several_blocks_has_the_colour_of_most():
    num_blocks = 4096 * 3
    ref_counts, owner = np.zeros(num_blocks, np.int32), np.full(num_blocks, -1, np.int32)
    is_hashed = np.zeros(num_blocks, bool)
    ref_counts[[3, 4, 6]], owner[[3, 4, 6]] = [1, 2, 1], 0
    is_hashed[9:11] = True
    states = by_hand(num_blocks, ref_counts=ref_counts, owner=owner, is_hashed=is_hashed)
    owners = (Owner("a", "a", "running", 48, 3, 0, 1),)
    svg = draw_pool(PoolSnapshot(16, states, None, owners))
    cells, fills = cells_of(svg), fills_of(svg)
    free = fills[100]
    assert fills[2] == free and fills[0] == free  # one used of three; the null block of three
    assert fills[1] != free and fills[3] not in (free, fills[1])
    assert title_of(cells[1]) == "blocks 3 to 5: 2 in use, 1 free, 1 shared"
    assert title_of(cells[3]) == "blocks 9 to 11: 2 cached, 1 free"
    assert marked(svg, "data-shared") == [1]


def test_groups_have_one_colour_that_they_keep():
    ids = ["x/0", "y", "x/1", "z"]

    def fills(order: list[str]) -> dict[str, str]:
        manager = BlockManager(40, 16)
        live = [admit(manager, make_request(r, [ids.index(r)] * 40)) for r in order]
        by_cell = fills_of(draw_pool(snapshot(manager, live)))
        return {r.request_id: by_cell[r.block_ids[0]] for r in live}

    together = fills(ids)
    assert together["x/0"] == together["x/1"]
    assert len({*together.values()}) == 3
    for name in ids:
        alone = fills([name])[name]
        assert alone == fills([name])[name]
    assert fills(["x/1", "x/0"])["x/1"] == fills(["x/0"])["x/0"]


def test_ids_of_any_kind_make_no_bad_xml():
    manager = BlockManager(40, 16)
    names = ["<b>&\"'</b>", "nul\x00 \ud800 line\nbreak", "long" * 50]
    live = [admit(manager, make_request(name, [i] * 20)) for i, name in enumerate(names)]
    report = MemoryReport(snapshot(manager, live), BLOCK_BYTES)
    cells = cells_of(report.svg())
    assert "<b>&\"'</b>" in title_of(cells[live[0].block_ids[0]])
    report.svg().encode("utf-8")
    assert "<b>" not in report._repr_html_()
    assert "line\ufffdbreak" in str(report)
    assert printable("abcdef", 4) == "abc…"


def test_save_writes_by_suffix(tmp_path):
    report = MemoryReport(snapshot(*chats(3, 100)), BLOCK_BYTES)
    report.save(tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == f"{report}\n"
    report.save(tmp_path / "a.svg")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag == f"{SVG}svg"
    report.save(str(tmp_path / "A.HTML"))
    page = (tmp_path / "A.HTML").read_text()
    assert page.startswith("<!DOCTYPE html>") and report.svg() in page and "KV in use" in page
    with pytest.raises(ValueError, match=r"pdf.*must be \.svg, \.html or \.txt"):
        report.save(tmp_path / "a.pdf")


def test_an_empty_pool_and_one_of_the_least_size():
    report = MemoryReport(snapshot(BlockManager(2, 16), []), BLOCK_BYTES)
    assert "no sequence holds blocks" in str(report)
    assert len(cells_of(report.svg())) == 2
    assert repr(report) == "MemoryReport(0 of 1 blocks in use, 0 sequences)"


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_bytes_are_written_in_iec_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_arrays_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="owner has shape"):
        by_hand(10, owner=np.zeros(9, np.int32))
