"""A model in stages, which are actors."""

import pytest
import ray

import forebay
from conftest import DEMO
from forebay.ray import _stages, staged

PROMPT = "Once upon a time, in a big house by the sea, there lived"
OPTIONS = {"device": "cpu", "memory": "512M"}


@pytest.fixture(scope="module")
def whole():
    with forebay.Model(DEMO, **OPTIONS) as model:
        yield model


@pytest.fixture
def links(monkeypatch):
    """The transports that were made since the test began."""
    made = []

    class Noted(_stages.ActorTransport):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(_stages, "ActorTransport", Noted)
    return made


def logits(llm):
    """Of a prompt, and of each token after it."""
    tokens = llm.tokenizer.encode(PROMPT)
    session = llm.session()
    session.extend(tokens[:8])
    rows = [bytes(session.logits)]
    for token in tokens[8:]:
        session.push(token)
        rows.append(bytes(session.logits))
    return rows


@pytest.mark.parametrize("stages", [2, 3, [(0, 1)]])
def test_logits_of_actors_equal_those_of_one_process(cluster, whole, links, stages):
    node_of = lambda _actor: ray.get_runtime_context().get_node_id()
    with staged(str(DEMO), stages, resource="stages", **OPTIONS) as model:
        assert logits(model) == logits(whole)
        # Each of them has a machine for itself.
        nodes = [ray.get(link.actor.__ray_call__.remote(node_of)) for link in links]
    assert len(nodes) == len(set(nodes)) == (stages - 1 if isinstance(stages, int) else len(stages))


def test_an_answer_goes_on_after_its_actors_were_killed(cluster, whole, links):
    ask = {"max_tokens": 60, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    expected = whole.generate(PROMPT, **ask).text
    with staged(str(DEMO), 3, resource="stages", **OPTIONS) as model:
        first = [link.actor for link in links]
        text, kills = "", {8: 0, 20: 1, 30: 0}
        for n, piece in enumerate(model.generate(PROMPT, stream=True, **ask)):
            text += piece.text
            if n in kills:
                ray.kill(links[kills[n]].actor)
        assert text == expected
        assert all(link.actor is not actor for link, actor in zip(links, first)), "no actor was started again"


def test_a_stage_that_cannot_be_loaded_says_why(cluster):
    with pytest.raises(ray.exceptions.RayActorError, match="BudgetError"):
        staged(str(DEMO), 2, resource="stages", device="cpu", memory="1M")
