"""The examples in docs/python.md work."""

import re

from conftest import DEMO, ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)


def test_the_examples_work(tmp_path, monkeypatch, capsys):
    assert len(EXAMPLES) > 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(DEMO)
    names = {}
    for example in EXAMPLES:
        if "from openai import" in example:
            continue
        # The demo model needs less, and the machine may have less.
        exec(re.sub(r'memory="\d+G"', 'memory="1G", device="cpu"', example), names)
    names["llm"].close()
    assert "experts have a slot" in capsys.readouterr().out


def test_the_readme_of_the_repository_has_an_example():
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {}
    exec(example.replace('"model.gguf", memory="24G"', ""), names)
    assert names["llm"].chat("Hello", max_tokens=1).finish_reason == "length"
