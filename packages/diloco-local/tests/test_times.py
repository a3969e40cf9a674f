import json

import pytest

from diloco_local._logs import Sampler, read_sample
from diloco_local._rundir import AttemptDir


def test_a_sample_per_growth(tmp_path):
    files, sampler = AttemptDir(tmp_path), Sampler()
    sampler.sample(files)
    assert not files.times.exists()
    for out, err in (("a\n", ""), ("a\n", ""), ("a\nb\n", ""), ("a\nb\n", "e\n")):
        files.log("stdout").write_text(out)
        files.log("stderr").write_text(err)
        sampler.sample(files)
    samples = [json.loads(line) for line in files.times.read_text().splitlines()]
    assert [sample[1:] for sample in samples] == [[2, 0], [4, 0], [4, 2]]
    assert sorted(sample[0] for sample in samples) == [sample[0] for sample in samples]


@pytest.mark.parametrize(
    "text",
    ["[Infinity,5,5]", "[-Infinity,5,5]", "[NaN,5,5]", "[-1,5,5]", "[1e12,5,5]", "[1,-5,5]",
     "[1,5]", "[" * 9000],
)  # fmt: skip
def test_what_no_sampler_writes_is_no_sample(text):
    assert read_sample(text) is None
    assert read_sample("[1.5, 5, 6]") == (1.5, 5, 6)
