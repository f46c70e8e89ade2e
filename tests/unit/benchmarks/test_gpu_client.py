"""The client of the GPU benchmark: what it sends, and what it makes of the answers."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from aiohttp import web
from prometheus_client import generate_latest
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from benchmarks.gpu import client
from benchmarks.gpu.client import Answer, Load, figures, steady
from vllm_kvevict.metrics.report import STATS_KEY, Report


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
        "seconds", "running", "waiting", "used", "preemptions", "evictions", "skipped",
        "waiting: capacity", "waiting: deferred",
        "postponed: blocks", "postponed: ring", "postponed: turn",
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="HTTP 500"):
        figures(answers[2:], [3], [])


@pytest.fixture
def served():
    """A server that streams as many tokens as it is asked for; the last prompt fails.

    No answer ends before the metrics were asked for.
    """
    asked, polled = [], threading.Event()

    async def complete(request):
        body = await request.json()
        asked.append(body)
        if len(asked) == 4:
            return web.Response(status=400, text="no")
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": ""}]}\n\n')
        await asyncio.to_thread(polled.wait, 60)
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return response

    def metrics() -> str:
        polled.set()
        return "vllm:num_requests_running 3.0\n"

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
        url=f"http://127.0.0.1:{port}",
        model="m",
        asked=asked,
        metric=lambda name: 2.0,
        metrics=metrics,
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
    assert found["peak_running"] == 3


@pytest.mark.usefixtures("unregistered")
def test_the_series_reads_what_vllm_writes(build):
    """The text is that of vLLM's own logger, of two engines."""
    config = build(dict(policy="ada-snapkv", budget="25%"), served_model_name="served")
    manager = StatLoggerManager(config, [0, 1])
    manager.log_engine_initialized()
    for engine in (0, 1):
        report = Report(
            evictions={"ada-snapkv": [2, 1]}, skipped_shared=4, postponed_blocks=5,
            postponed_ring=6, postponed_turn=7,
        )  # fmt: skip
        stats = SchedulerStats(
            num_running_reqs=16, num_waiting_reqs=8, num_skipped_waiting_reqs=3,
            kv_cache_usage=0.25, kv_connector_stats={STATS_KEY: vars(report)},
        )  # fmt: skip
        iteration = IterationStats()
        iteration.num_preempted_reqs = 1
        manager.record(stats, iteration, engine_idx=engine)
    found = dict(zip(client.GAUGES, client.polled(generate_latest().decode()), strict=True))
    assert found == {
        "running": 32, "waiting": 22, "used": 0.5, "preemptions": 2, "evictions": 6, "skipped": 8,
        "waiting: capacity": 16, "waiting: deferred": 6,
        "postponed: blocks": 10, "postponed: ring": 12, "postponed: turn": 14,
    }  # fmt: skip
    assert set(client.polled("")) == {0}, "of a server without such metrics"
