"""The client of the GPU benchmark: what it sends, and what it makes of the answers."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from aiohttp import web

from benchmarks.gpu import client
from benchmarks.gpu.client import Answer, Load, figures, steady


def test_outputs_differ_in_length_and_have_the_mean():
    load = Load(6000, 500, 96, 96)
    outputs = load.outputs()
    assert outputs == Load(6000, 500, 96, 4).outputs(), "the same for every server"
    assert min(outputs) >= 100 and max(outputs) == load.longest_output <= 900
    assert abs(sum(outputs) / 96 - 500) < 60 and len(set(outputs)) > 60
    assert load.prompt(0, 1000) != load.prompt(1, 1000) and len(load.prompt(0, 1000)) == 6000


def answer(sent: float, *times: float) -> Answer:
    return Answer(sent, list(times))


def test_the_steady_part_is_between_the_first_end_and_the_last_begin():
    """Two requests run at once, a token a second; the third begins when the first has ended."""
    answers = [answer(0, 1, 2, 3), answer(0, 1, 2, 3, 4, 5), answer(0, 4, 5, 6), answer(0, 6, 7)]
    found = steady(answers, [3, 5, 3, 2])
    # From 3 to 6: tokens at 4 and 5, at 4, 5 and 6, and at 6.
    assert found == {"seconds": 3, "output_tokens_per_s": 6 / 3}
    # Parts of two tokens each count as two.
    assert steady(answers, [6, 10, 6, 4])["output_tokens_per_s"] == 4
    assert steady(answers[:2], [3, 5]) is None, "none began after another had ended"


def test_figures_of_a_load():
    answers = [answer(0, 1, 2, 3), answer(0, 4, 5, 6), Answer(0, [], "HTTP 500")]
    series = [[0.0, 1, 2, 0.5, 0, 0, 0], [1.0, 2, 1, 0.9, 0, 1, 3], [2.0, 1, 0, 0.4, 0, 2, 3]]
    found = figures(answers, [3, 3, 3], series)
    assert (found["completed"], found["failed"], found["prompts"]) == (2, 1, 3)
    assert found["output_tokens_per_s"] == 1 and found["steady_output_tokens_per_s"] == 1
    assert found["ttft_ms_median"] == 2500 and found["tpot_ms_median"] == found["itl_ms_p99"] == 1e3
    assert found["peak_running"] == 2 and found["running_while_others_wait"] == 1.5
    assert found["series"]["columns"] == [
        "seconds", "running", "waiting", "used", "preemptions", "evictions", "postponed"
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="HTTP 500"):
        figures(answers[2:], [3], [])


@pytest.fixture
def served():
    """A server that streams as many tokens as it is asked for; the last prompt fails."""
    asked = []

    async def complete(request):
        body = await request.json()
        asked.append(body)
        if len(asked) == 4:
            return web.Response(status=400, text="no")
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": ""}]}\n\n')
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return response

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    port = site._server.sockets[0].getsockname()[1]
    yield SimpleNamespace(
        url=f"http://127.0.0.1:{port}", model="m", asked=asked, metric=lambda name: 2.0
    )
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(runner.cleanup())
    loop.close()


def test_a_load_is_sent_and_counted(served):
    load = Load(5, 4, 4, 1)
    found = client.measure(served, load, 50, interval_s=0.001)
    assert [body["max_tokens"] for body in served.asked] == load.outputs()
    assert all(body["ignore_eos"] and len(body["prompt"]) == 5 for body in served.asked)
    assert (found["completed"], found["failed"], found["preemptions"]) == (3, 1, 0)
    assert "HTTP 400: no" in found["errors"][0]
