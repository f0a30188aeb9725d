"""Do kernels run on every core, and on no hyper-thread?"""

import os

import pytest

from pimflow.tvm_extension.install import use_cores


@pytest.mark.parametrize(
    "siblings, allowed, threads",
    [
        (["0", "1"], {0, 1}, "2"),
        (["0-1", "0-1", "2-3", "2-3"], {0, 1, 2, 3}, "2"),
        (["0-1", "0-1", "2-3", "2-3"], {1, 2}, "2"),
        (["0", "1", "2", "3"], {3}, "1"),
        (["0"], {0, 1}, None),  # Linux says nothing of one
    ],
)
def test_a_thread_for_each_core(tmp_path, monkeypatch, siblings, allowed, threads):
    for number, text in enumerate(siblings):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    monkeypatch.delenv("TVM_BIND_THREADS", raising=False)
    use_cores(tmp_path)
    assert os.environ["TVM_BIND_THREADS"] == "0"
    assert os.environ.get("TVM_NUM_THREADS") == threads
    monkeypatch.setenv("TVM_NUM_THREADS", "7")
    monkeypatch.setenv("TVM_BIND_THREADS", "1")
    use_cores(tmp_path)
    assert (os.environ["TVM_NUM_THREADS"], os.environ["TVM_BIND_THREADS"]) == ("7", "1")
