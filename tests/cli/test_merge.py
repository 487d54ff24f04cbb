import gzip
import json
import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from lightning_chakra.cli import main
from lightning_chakra.traces.clocks import RankTimes, align
from lightning_chakra.traces.nesting import Fix, nest

SHARED = Path(os.environ.get("LIGHTNING_CHAKRA_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
MS = 1_000_000


# --- Perfetto's rules ------------------------------------------------------------------------------------------------


def against_perfettos_rules(events):
    """What Perfetto's JSON importer would drop, misplace or draw wrongly, as one line each."""
    found = []
    tracks = defaultdict(list)
    flows = defaultdict(list)
    named = {e["pid"] for e in events if e["name"] == "process_name"}
    for e in events:
        if e["ph"] == "X":
            if not all(isinstance(e.get(key), (int, float)) for key in ("ts", "dur")):
                found.append(f"incomplete: {e}")
            elif e["dur"] < 0 or e["ts"] < 0:
                found.append(f"negative: {e}")
            else:
                tracks[e["pid"], e["tid"]].append((round(e["ts"] * 1000), round(e["dur"] * 1000)))
        elif e["ph"] in ("s", "f"):
            flows[e["id"]].append(e)
        if not isinstance(e.get("pid"), int) or not isinstance(e.get("tid"), int):
            found.append(f"no numbers for process and thread: {e}")
        elif e["pid"] not in named:
            found.append(f"process without name: {e}")
    for track, slices in tracks.items():
        stack = []
        for start, dur in sorted(slices, key=lambda s: s[0]):  # stable: as Perfetto, by time and then as in the file
            while stack and stack[-1] <= start:
                stack.pop()
            if stack and start + dur > stack[-1]:
                found.append(f"overlap on {track} at {start} ns: Perfetto drops this slice")
                continue
            stack.append(start + dur)
    found += [
        f"flow {id_} has not one start and one end"
        for id_, ends in flows.items()
        if sorted(e["ph"] for e in ends) != ["f", "s"]
    ]
    threads = defaultdict(set)
    for e in events:
        threads[e["tid"]].add(e["pid"])
    found += [f"thread {t} is in processes {p}" for t, p in threads.items() if len(p) > 1 and t != 0]
    return found


def test_the_rules_see_what_perfetto_drops():
    name = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "x"}}
    a = {"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 0.0, "dur": 2.0}
    b = {"ph": "X", "name": "b", "pid": 1, "tid": 2, "ts": 1.0, "dur": 2.0}
    flow = {"ph": "s", "name": "f", "id": 1, "pid": 1, "tid": 2, "ts": 0.0}
    assert against_perfettos_rules([name, a]) == []
    assert "overlap" in against_perfettos_rules([name, a, b])[0]
    assert "flow 1" in against_perfettos_rules([name, a, flow])[0]


# --- nesting ---------------------------------------------------------------------------------------------------------


def test_slices_that_nest_are_left_alone():
    assert nest([0, 10, 20, 100], [50, 5, 30, 10]) == {}


def test_an_end_that_sticks_out_by_rounding_is_cut():
    assert nest([0, 5_000], [10_000, 6_000]) == {1: Fix(5_000, 5_000, 0)}


def test_one_slice_running_into_the_next_by_rounding_ends_where_that_begins():
    assert nest([0, 9_500], [10_000, 50_000]) == {0: Fix(0, 9_500, 0)}


def test_slices_that_really_overlap_get_another_row():
    assert nest([0, 50_000, 60_000], [100_000, 100_000, 10_000]) == {1: Fix(50_000, 100_000, 1)}
    assert {f.lane for f in nest([0, 10_000, 20_000], [100_000] * 3).values()} == {1, 2}


def test_a_child_that_comes_before_its_parent_in_the_file_starts_later():
    assert nest([100, 100], [10, 50]) == {0: Fix(101, 9, 0)}


# --- clocks ----------------------------------------------------------------------------------------------------------


def ranks_on(hosts, *, skew, collectives=True, numbered=False):
    """One rank per host; each host's clock is off by its skew, the collectives end within 10 µs."""
    group = ("w", "0", "[0, 1]", "allreduce")
    return [
        RankTimes(
            rank,
            host,
            steps={("w", n): n * 10 * MS + skew[rank] + rank * 50_000 for n in (1, 2, 3)},
            collectives={
                group: [(n if numbered else None, n * 10 * MS + 5 * MS + skew[rank] + rank * 5_000) for n in (1, 2, 3)]
            }
            if collectives
            else {},
        )
        for rank, host in enumerate(hosts)
    ]


def test_ranks_of_one_host_keep_their_clock():
    result = align(ranks_on(["a", "a", "a"], skew=[0, 0, 0]))
    assert (result.method, set(result.offsets.values()), result.hosts) == ("clock", {0}, 1)
    assert result.judged_by == "collectives"
    assert result.residual_us == 10


def test_hosts_are_aligned_by_the_ends_of_collectives():
    result = align(ranks_on(["a", "b", "a"], skew=[0, 7_000 * MS, 0]))
    assert result.method == "collectives"
    assert result.offsets[0] == result.offsets[2] == 0
    assert result.offsets[1] == pytest.approx(-7_000 * MS, abs=10_000)
    assert result.residual_max_us <= 15


def test_without_collectives_by_step_starts():
    result = align(ranks_on(["a", "b"], skew=[0, -3_000 * MS], collectives=False))
    assert (result.method, result.offsets[1], result.judged_by) == ("steps", 3_000 * MS - 50_000, "steps")


def test_hosts_without_a_common_group_are_aligned_through_a_third():
    def rank(number, **groups):
        return RankTimes(number, f"host{number}", collectives={(g,): [(None, t)] for g, t in groups.items()})

    result = align([rank(0, x=1000), rank(2, y=9000), rank(1, x=2000, y=3000)])
    assert result.offsets == {0: 0, 1: -1000, 2: -7000}


def test_series_of_different_length_are_matched_by_number_only():
    one, two = ranks_on(["a", "b"], skew=[0, 5 * MS], numbered=True)
    group = next(iter(two.collectives))
    two.collectives[group].pop(0)
    assert align([one, two]).offsets[1] == pytest.approx(-5 * MS, abs=5_000)
    for rank in (one, two):
        rank.collectives[group][:] = [(None, end) for _, end in rank.collectives[group]]
    assert align([one, two]).method == "steps"


def test_ranks_that_share_nothing_are_named():
    result = align([RankTimes(0, "a", {"s": 1}), RankTimes(1, "b", {"t": 1})])
    assert (result.unaligned, result.method) == ((1,), "none")


# --- the command -----------------------------------------------------------------------------------------------------


def kineto(rank, *, host="node0", base=1_700_000_000_000_000_000, skew_us=0.0, gpu=True, pid=100, extra=()):
    """A small trace in Kineto's words: two steps with an operator, its kernel and the all-reduce between them."""
    t0 = 1000.0 + skew_us + rank * 3

    def x(cat, name, pid, tid, ts, dur, **args):
        return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}

    def name(process, label, index):
        return [
            {"ph": "M", "name": "process_name", "ts": t0, "pid": process, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_labels", "ts": t0, "pid": process, "tid": 0, "args": {"labels": label}},
            {
                "ph": "M",
                "name": "process_sort_index",
                "ts": t0,
                "pid": process,
                "tid": 0,
                "args": {"sort_index": index},
            },
        ]

    events = [*name(pid, "CPU", pid), *name(0, "GPU 0", 5_000_000), *name(1, "GPU 1", 5_000_001)]
    for n in (0, 1):
        t = t0 + n * 1000
        events.append(x("user_annotation", f"ProfilerStep#{n}", pid, pid, t, 900.0))
        events.append(x("cpu_op", "aten::mm", pid, pid, t + 10, 50.5, **{"Record function id": n + 1}))
        if gpu:
            events += [
                x("kernel", "gemm", 0, 7, t + 30.25, 100.0, stream=7, correlation=n),
                {"ph": "s", "id": n + 1, "pid": pid, "tid": pid, "ts": t + 10, "cat": "ac2g", "name": "ac2g"},
                {"ph": "f", "id": n + 1, "pid": 0, "tid": 7, "ts": t + 30.25, "cat": "ac2g", "name": "ac2g", "bp": "e"},
                {"ph": "s", "id": 90 + n, "pid": pid, "tid": pid, "ts": t + 10, "cat": "ac2g", "name": "ac2g"},
                x(
                    "kernel",
                    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                    0,
                    24,
                    t + 200 - rank * 3,
                    300.0,
                    **{"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"},
                ),
            ]
    events.append({"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": t0 + 1950})
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        **({"host_name": host} if host else {}),
        "baseTimeNanoseconds": base,
        "traceEvents": events + list(extra),
        "traceName": f"rank-{rank}.json",
    }


def write(folder, rank, trace):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace, indent=1).encode()))
    return path


def read(path):
    return json.loads(gzip.decompress(Path(path).read_bytes()))


def merged(tmp_path, capsys, *traces, options=()):
    for trace in traces:
        write(tmp_path / "d" / "pytorch_profile", trace["distributedInfo"]["rank"], trace)
    code = main(["merge", str(tmp_path / "d"), "--output", str(tmp_path / "m.json.gz"), "--jobs", "1", *options])
    said = capsys.readouterr()
    return code, said.out + said.err, read(tmp_path / "m.json.gz") if (tmp_path / "m.json.gz").exists() else None


def names_of(timeline):
    return {e["pid"]: e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "process_name"}


def start_of(timeline, name, rank):
    names = names_of(timeline)
    return next(
        e["ts"]
        for e in timeline["traceEvents"]
        if e["name"].startswith(name) and names[e["pid"]].startswith(f"rank {rank}:")
    )


def test_each_rank_has_named_and_sorted_processes(tmp_path, capsys):
    code, said, timeline = merged(tmp_path, capsys, kineto(0), kineto(1))
    assert code == 0, said
    order = {e["pid"]: e["args"]["sort_index"] for e in timeline["traceEvents"] if e["name"] == "process_sort_index"}
    assert [name for _, name in sorted((order[pid], name) for pid, name in names_of(timeline).items())] == [
        "rank 0: CPU (python 100)",
        "rank 0: GPU 0",
        "rank 0: profiler",
        "rank 1: CPU (python 100)",
        "rank 1: GPU 0",
        "rank 1: profiler",
    ]
    assert against_perfettos_rules(timeline["traceEvents"]) == []


def test_no_event_is_lost_but_arrows_with_one_end(tmp_path, capsys):
    before = Counter(e["name"] for e in kineto(0)["traceEvents"] if e["ph"] in "Xi")
    _, _, timeline = merged(tmp_path, capsys, kineto(0), kineto(1))
    after = Counter(e["name"] for e in timeline["traceEvents"] if e["ph"] in "Xi")
    assert after == {name: 2 * n for name, n in before.items()}
    flows = [e for e in timeline["traceEvents"] if e["ph"] in "sf"]
    assert len(flows) == 8
    assert len({e["id"] for e in flows}) == 4
    arguments = [e["args"] for e in timeline["traceEvents"] if e["name"] == "aten::mm"]
    assert arguments == [{"Record function id": 1}, {"Record function id": 2}] * 2


def test_one_host_goes_by_its_clock_whatever_the_base(tmp_path, capsys):
    base = 1_700_000_000_000_000_000
    _, said, timeline = merged(tmp_path, capsys, kineto(0, base=base), kineto(1, base=base - 10**9, skew_us=10**6))
    assert "all ranks are on one host" in said
    assert start_of(timeline, "aten::mm", 1) - start_of(timeline, "aten::mm", 0) == pytest.approx(3, abs=0.001)
    assert timeline["baseTimeNanoseconds"] == base + 1_000_000  # absolute times stay


def test_several_hosts_go_by_the_ends_of_collectives(tmp_path, capsys):
    code, said, timeline = merged(tmp_path, capsys, kineto(0), kineto(1, host="node1", skew_us=4_000_000.0))
    assert code == 0
    assert "2 hosts aligned by the ends of shared collectives; 2 shared collectives end within 0.0 µs" in said
    assert start_of(timeline, "ncclDevKernel", 1) == pytest.approx(start_of(timeline, "ncclDevKernel", 0), abs=0.002)


def test_several_hosts_without_collectives_go_by_steps(tmp_path, capsys):
    traces = [kineto(0, gpu=False), kineto(1, host="node1", skew_us=4_000_000.0, gpu=False)]
    _, said, timeline = merged(tmp_path, capsys, *traces)
    assert "aligned by the starts of the steps; 2 shared steps start within 0.0 µs" in said
    assert start_of(timeline, "ProfilerStep", 1) == pytest.approx(start_of(timeline, "ProfilerStep", 0), abs=0.002)


def test_overlapping_slices_keep_their_time_in_a_row_of_their_own(tmp_path, capsys):
    late = {"ph": "X", "cat": "gpu_user_annotation", "name": "late", "pid": 0, "tid": 7, "ts": 1100.0, "dur": 500.0}
    flow = [
        {"ph": "s", "id": 77, "pid": 100, "tid": 100, "ts": 1010.0, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 77, "pid": 0, "tid": 7, "ts": 1100.0, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    ]
    code, said, timeline = merged(tmp_path, capsys, kineto(0, extra=[late, *flow]), kineto(1))
    assert code == 0
    assert "1 slices run at the same time" in said
    assert against_perfettos_rules(timeline["traceEvents"]) == []
    slice_ = next(e for e in timeline["traceEvents"] if e["name"] == "late")
    assert slice_["dur"] == 500.0
    end = next(e for e in timeline["traceEvents"] if e["ph"] == "f" and e["ts"] == slice_["ts"])
    assert end["tid"] == slice_["tid"]
    rows = [e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "thread_name" and e["tid"] == end["tid"]]
    assert rows == ["thread 7 (overlapping 1)"]


def test_ranks_are_chosen(tmp_path, capsys):
    code, said, timeline = merged(tmp_path, capsys, kineto(0), kineto(1), kineto(2), options=["--ranks", "1-2"])
    assert code == 0, said
    assert timeline["lightning_chakra_merge"]["ranks"] == [1, 2]


def test_a_missing_rank_is_refused(tmp_path, capsys):
    code, said, timeline = merged(tmp_path, capsys, kineto(0), kineto(2), options=["--ranks", "0-2"])
    assert (code, timeline) == (2, None)
    assert "no traces of rank 1, only of ranks 0,2" in said


def test_nothing_is_overwritten_without_being_told(tmp_path, capsys):
    merged(tmp_path, capsys, kineto(0))
    before = (tmp_path / "m.json.gz").read_bytes()
    code, said, _ = merged(tmp_path, capsys, kineto(1))
    assert code == 2
    assert "--overwrite" in said
    assert (tmp_path / "m.json.gz").read_bytes() == before
    code, _, timeline = merged(tmp_path, capsys, kineto(1), options=["--overwrite"])
    assert code == 0
    assert timeline["lightning_chakra_merge"]["ranks"] == [0, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "m.json.gz"]


def test_the_timeline_does_not_go_among_the_traces(tmp_path, capsys):
    folder = tmp_path / "pytorch_profile"
    write(folder, 0, kineto(0))
    assert main(["merge", str(tmp_path), "--output", str(folder / "all.json.gz")]) == 2
    assert "one more rank" in capsys.readouterr().err


def test_a_cut_trace_leaves_no_timeline(tmp_path, capsys):
    write(tmp_path / "d" / "pytorch_profile", 0, kineto(0))
    path = write(tmp_path / "d" / "pytorch_profile", 1, kineto(1))
    path.write_bytes(path.read_bytes()[:-300])
    assert main(["merge", str(tmp_path / "d"), "--output", str(tmp_path / "m.json.gz"), "--jobs", "1"]) == 1
    assert "rank-1.json.gz" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_windows_of_one_run_share_their_processes(tmp_path, capsys):
    for step, skew in (("step-00000000", 0.0), ("step-00000020", 9_000.0)):
        for rank in (0, 1):
            write(tmp_path / "d" / step / "pytorch_profile", rank, kineto(rank, skew_us=skew))
    code, said, timeline = merged(tmp_path, capsys)
    assert code == 0, said
    assert len(names_of(timeline)) == 6
    assert against_perfettos_rules(timeline["traceEvents"]) == []
    assert "4 shared collectives" in said


def test_several_runs_are_refused(tmp_path, capsys):
    write(tmp_path / "d" / "pytorch_profile", 0, kineto(0))
    write(tmp_path / "d" / "run-1" / "pytorch_profile", 0, kineto(0))
    code, said, _ = merged(tmp_path, capsys)
    assert code == 2
    assert "name one of the folders pytorch_profile, run-1" in said


@pytest.mark.parametrize("name", ["pytorch_profile", "run-1"])
def test_one_of_several_runs_is_named_by_its_folder(tmp_path, capsys, name):
    write(tmp_path / "d" / "pytorch_profile", 0, kineto(0))
    write(tmp_path / "d" / "run-1" / "pytorch_profile", 0, kineto(0))
    assert main(["merge", str(tmp_path / "d" / name), "--output", str(tmp_path / "m.json.gz")]) == 0
    assert "MB, rank 0\n" in capsys.readouterr().out


def test_two_traces_of_one_rank_are_refused(tmp_path, capsys):
    write(tmp_path / "d" / "pytorch_profile", 0, kineto(0))
    write(tmp_path / "d" / "pytorch_profile", 1, kineto(0))
    code, said, _ = merged(tmp_path, capsys)
    assert code == 1
    assert "both say that they are rank 0" in said


def test_json_for_programs(tmp_path, capsys):
    write(tmp_path / "d" / "pytorch_profile", 0, kineto(0))
    assert main(["merge", str(tmp_path / "d"), "--output", str(tmp_path / "m.json.gz"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ranks"] == [0]
    assert said["alignment"]["method"] == "clock"
    assert said["bytes"] == (tmp_path / "m.json.gz").stat().st_size


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not there")
def test_ranks_of_a_public_gpu_trace(tmp_path, capsys):
    folder = tmp_path / "d"
    folder.mkdir()
    for path in SHARED.glob("astrasim-megatron-tp8/megatron_kineto_[0-2].json.gz"):
        (folder / path.name).symlink_to(path)
    code = main(["merge", str(folder), "--output", str(tmp_path / "m.json.gz"), "--jobs", "1"])
    said = capsys.readouterr().out
    assert code == 0
    assert "84 shared collectives end within" in said
    timeline = read(tmp_path / "m.json.gz")
    assert timeline["lightning_chakra_merge"]["alignment"]["residual_max_us"] < 100
    assert against_perfettos_rules(timeline["traceEvents"]) == []
