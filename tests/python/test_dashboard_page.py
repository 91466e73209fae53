"""The dashboard's page in a real browser: what it shows, and what it never does."""

import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from browser import Browser, missing
from fake_dashboard import Facts, FakeDashboard
from made_up_job import MadeUpJob, Wire
from servers import TenfoldServer, tenfold_binary

pytestmark = [
    pytest.mark.tenfold_only("has no dashboard"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(600),
]

HOSTILE = "<img src=x onerror=\"window.hacked='key'\"><script>window.hacked='key'</script>"
ENTER = "\ue007"


class Dashboard(TenfoldServer):
    """`tenfold serve --dashboard`."""

    def __init__(self, log: Path, *options: str) -> None:
        super().__init__(log, "--drain", "0s", "--dashboard", "127.0.0.1:0", *options)
        line = self.process.stdout.readline()
        words, _, self.url = line.strip().rpartition(" ")
        assert words == "dashboard on", f"the second line is {line!r}"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Browser:
    """A page with nothing in it, as wide as a desk's, in light colours; what went before is forgotten."""
    window.open("about:blank")
    window.resize(1280, 900)
    window.prefer("light")
    window.complaints()
    window.requested()
    return window


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Dashboard]]:
    started: list[Dashboard] = []

    def start(*options: str) -> Dashboard:
        started.append(Dashboard(tmp_path / f"server-{len(started)}.log", *options))
        return started[-1]

    yield start
    for server in started:
        with server.process as process:
            process.kill()


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeDashboard]]:
    started: list[FakeDashboard] = []

    def start(*arguments: int, port: int = 0) -> FakeDashboard:
        started.append(FakeDashboard(Facts(*arguments), port))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def look(browser: Browser, url: str) -> None:
    """Opens the page, and returns when it has shown its first facts."""
    browser.open(url)
    browser.until("document.querySelector('#pulse.live') && document.querySelector('#verdicts p')")


def width_of(browser: Browser) -> int:
    return browser.run("return document.documentElement.scrollWidth")


def nodes_of(browser: Browser) -> int:
    return browser.run("return document.querySelectorAll('*').length")


@pytest.mark.smoke
def test_it_says_which_rank_has_not_joined_without_a_complaint_or_a_request_to_elsewhere(browser, serve):
    server = serve()
    with closing(MadeUpJob(server.address)):
        look(browser, server.url)
        verdict = "document.querySelector('.verdict').innerText"
        missing = "7 of 8 ranks joined — rank 5 (host b7) has not joined, 6 have waited up to "
        browser.until(f"{verdict}.includes('{missing}')")
        browser.until("document.querySelector('.ranks tr.absent')?.innerText.includes('not joined')")
        rows = browser.run(
            "return [...document.querySelectorAll('.ranks tr.problem')].map(row => row.innerText)"
        )
        assert any(row.startswith("5") and "not joined" in row for row in rows), rows
        # Who waits, for what: one line for all of them.
        waiting = browser.until("document.querySelector('#waiting-table tbody tr')?.innerText")
        assert "default_pg/0//cpu//0/5" in waiting
        assert "ranks 0\u20134, 7" in waiting
        browser.until("document.querySelector('#keys-table tbody tr')")
        assert "1 of" not in browser.run("return document.querySelector('#refused-count').innerText")
    assert browser.complaints() == []
    requests = browser.requested()
    assert f"{server.url}api/overview" in requests
    assert [url for url in requests if not url.startswith(server.url)] == []


def test_a_job_of_tenfold_run_is_shown_with_the_ranks_that_have_not_joined(browser):
    # Programs that know nothing of a store: they run, and never join.
    command = [tenfold_binary(), "run", "-n", "2", "--dashboard", "sleep", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            lines = []
            for line in launcher.stdout:
                lines.append(line)
                if "dashboard on http" in line:
                    break
            assert lines, "the launcher ended"
            assert "dashboard on http" in lines[-1], lines
            look(browser, lines[-1].split()[-1])
            verdict = "document.querySelector('.verdict').innerText"
            browser.until(f"{verdict}.includes('0 of 2 ranks joined')")
            browser.until("document.querySelectorAll('.ranks tr.absent').length === 2")
            assert browser.complaints() == []
        finally:
            launcher.terminate()
            launcher.stdout.read()


def test_a_rank_that_hangs_in_its_own_code_is_shown_with_what_it_last_asked_for(browser, fake):
    look(browser, fake().url)
    rank = "[...document.querySelectorAll('.ranks tbody tr')].find(row => row.innerText.startsWith('6'))"
    assert "after set in the store, " in browser.until(f"{rank}?.innerText")


def test_ranks_that_were_replaced_are_shown_with_who_took_their_place(browser, fake):
    look(browser, fake().url)
    told = "[...document.querySelectorAll('.generations li')].map(item => item.innerText)"
    lines = browser.until(f"{told}.length && {told}")
    assert len(lines) == 1, "the first generation has replaced no rank"
    assert lines[0].startswith("generation 2 after 0.31 s, ")
    assert lines[0].endswith(": rank 3 (pid 903, killed by SIGKILL) was replaced by pid 4003")
    facts = browser.run("return document.querySelector('.facts').innerText")
    assert "spares 1" in " ".join(facts.split())
    assert "generation 2" in " ".join(facts.split())
    assert browser.complaints() == []


def test_a_wait_of_more_than_ten_seconds_is_called_stuck(browser, fake):
    look(browser, fake().url)
    stuck = browser.run("return [...document.querySelectorAll('.ranks tr.stuck')].map(row => row.innerText)")
    assert len(stuck) == 6, stuck
    assert "◕" in stuck[0], "a sign and a word, not only a colour"
    assert "stuck" in stuck[0]


def test_charts_move_under_load(browser, serve):
    server = serve()
    look(browser, server.url)
    chart = "document.querySelector('#chart-operations svg').getAttribute('aria-label')"
    most = f"Number(/at most ([0-9.,]+)/.exec({chart})?.[1].replaceAll(',', ''))"
    before = browser.until(f"[{chart}]")[0]
    path = "document.querySelector('#chart-operations path')?.getAttribute('d')"
    with closing(Wire(server.address)) as client:
        for number in range(3000):
            client.set(f"load/{number % 100}", b"x" * 100)
        client.ping()
    browser.until(f"{most} >= 100")
    assert browser.run(f"return {chart}") != before
    drawn = browser.until(path)
    browser.until(f"{path} !== args[0]", drawn)
    browser.until("document.querySelector('#operations-table').innerText.includes('set')")
    assert "3,000" in browser.run("return document.querySelector('#operations-table').innerText")
    sent = "document.querySelector('#chart-traffic svg').getAttribute('aria-label')"
    assert "KiB" in browser.run(f"return {sent}")
    assert browser.complaints() == []


def test_what_strangers_wrote_is_shown_as_text(browser, serve):
    server = serve("--dashboard-values")
    with closing(Wire(server.address)) as client, closing(Wire(server.address)) as waiter:
        client.set(HOSTILE.replace("/", "|"), HOSTILE)
        client.set(f"{HOSTILE}/inside", "x")
        waiter.wait_for(f"never/{HOSTILE}")
        with closing(MadeUpJob(server.address, name=HOSTILE.replace("/", "|"), hosts=(HOSTILE, "b"))):
            look(browser, server.url)
            browser.until("document.querySelectorAll('#keys-table tbody tr').length >= 3")
            keys = browser.run("return document.querySelector('#keys-table').innerText")
            assert HOSTILE.replace("/", "|") in keys
            browser.until("document.querySelector('#waiting-table').innerText.includes('<script>')")
            browser.until("document.querySelector('#runs').innerText.includes('<script>')")
            browser.click("#keys-table .show-value")
            browser.until("document.querySelector('#value-text').innerText.includes('<script>')")
    foreign = ", ".join(
        f"{part} {kind}" for part in ["main", "dialog"] for kind in ["img", "script", "iframe"]
    )
    assert browser.run("return document.querySelectorAll(arguments[0]).length", foreign) == 0
    assert browser.run("return window.hacked ?? null") is None
    assert browser.complaints() == []


def test_a_value_is_shown_on_request_and_only_if_the_server_allows_it(browser, serve):
    server = serve("--dashboard-values")
    with closing(Wire(server.address)) as client:
        client.set("color", "blue")
        client.set("blob", bytes(range(256)))
        client.ping()
        look(browser, server.url)
        browser.until("document.querySelectorAll('.show-value').length === 2")
        assert not any("api/value" in url for url in browser.requested()), "no value was asked for yet"
        browser.click("[aria-label='show the value of /color']")
        browser.until("document.querySelector('#value[open] #value-text')?.innerText === 'blue'")
        assert browser.run("return document.querySelector('#value-note').innerText") == "4 B, as text"
        browser.click("#value button")
        browser.click("[aria-label='show the value of /blob']")
        browser.until("document.querySelector('#value-text').innerText.startsWith('0000  00 01 02')")
        browser.click("#value button")
    assert browser.complaints() == []


def test_without_leave_there_is_no_button_for_a_value(browser, serve):
    server = serve()
    with closing(Wire(server.address)) as client:
        client.set("color", "blue")
        client.ping()
        look(browser, server.url)
        browser.until("document.querySelector('#keys-table').innerText.includes('color')")
        assert browser.run("return document.querySelectorAll('.show-value').length") == 0
        note = browser.run("return document.querySelector('#keys-note').innerText")
        assert note == "Values are not shown: start the server with --dashboard-values to allow it."
        assert "blue" not in browser.text()


def test_keys_are_looked_into_prefix_by_prefix_and_back(browser, serve):
    server = serve()
    with closing(Wire(server.address)) as client:
        client.set_many(
            [(f"job/{rank}/address", "x" * 10) for rank in range(3)] + [("job/world", "3"), ("other", "1")]
        )
        client.socket.sendall(b"\x01" + b"\x05\0\0\0\0\0\0\0" + b"/\xff\xfe/a" + b"\1\0\0\0\0\0\0\0" + b"x")
        client.ping()
        look(browser, server.url)
        rows = "[...document.querySelectorAll('#keys-table tbody tr')]"
        names = f"{rows}.map(row => row.cells[0].innerText).join(' ')"
        crumbs = "document.querySelector('#crumbs').innerText.replace(/\\s+/g, ' ').trim()"
        shown = browser.until(f"/job/.test({names}) && {names}")
        assert set(shown.split()) >= {"job/", "other"}, shown
        browser.press("#keys-table tbody tr button", ENTER)  # by keyboard, the largest group
        browser.until(f"{names} === '0/ 1/ 2/ world'")
        assert browser.run(f"return {crumbs}") == "all keys \u203a job/"
        browser.click("#keys-table tbody tr button")
        browser.until(f"{names} === 'address'")
        assert browser.run(f"return {crumbs}") == "all keys \u203a job/ 0/"
        browser.run("history.back()")
        browser.until(f"{names} === '0/ 1/ 2/ world'")
        browser.click("#crumbs button")
        browser.until(f"/other/.test({names})")
        # A name that is not text can be opened as well.
        last = "[...document.querySelectorAll('#keys-table tbody tr button')].at(-1)"
        browser.run(f"{last}.click()")
        browser.until(f"{names} === 'a'")
    assert browser.complaints() == []


def test_keys_that_are_still_being_counted_are_said_to_be_and_shown_when_they_are(browser, fake):
    server = fake()
    server.facts.is_counting = True
    look(browser, server.url)
    browser.run("document.querySelector('#keys').scrollIntoView()")
    browser.until("document.querySelector('#keys-note').innerText === 'Counting…'")
    server.facts.is_counting = False
    browser.until("document.querySelector('#keys-table').innerText.includes('default_pg/')")
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_whatever_the_names_are(browser, serve, scheme):
    server = serve("--dashboard-values")
    long = "a-very-long-name-without-any-space-" * 8
    with closing(Wire(server.address)) as client, closing(Wire(server.address)) as waiter:
        client.set(f"{long}/{long}", "x" * 5000)
        client.set(long, "x")
        waiter.wait_for(long + "never")
        with closing(MadeUpJob(server.address, name=long[:200], hosts=(long[:100], "b"))):
            browser.resize(360, 740, 2.0, phone=True)
            browser.prefer(scheme)
            look(browser, server.url)
            browser.run("document.querySelector('#keys').scrollIntoView()")
            browser.until("document.querySelectorAll('#keys-table tbody tr').length >= 3")
            browser.run("document.querySelector('#clients').open = true")
            browser.run("document.querySelector('#clients').scrollIntoView()")
            browser.until("document.querySelector('#clients-table tbody tr')")
            browser.run("document.querySelector('.ranks tbody button').click()")
            browser.until("document.querySelector('dl.detail')")
            every = "[...document.querySelectorAll('body *')]"
            wide = f"{every}.filter(node => node.getBoundingClientRect().right > 360.5)"
            assert browser.run(f"return {wide}.map(node => node.tagName + '.' + node.className)") == []
            assert width_of(browser) == 360


def test_light_and_dark_follow_the_system_and_then_the_button(browser, fake):
    look(browser, fake().url)
    browser.run("localStorage.clear(); location.reload()")
    browser.until("document.querySelector('#pulse.live')")
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = browser.run(colour)
    browser.prefer("dark")
    dark = browser.run(colour)
    assert light != dark
    browser.click("#theme")
    assert browser.run("return document.querySelector('#theme').innerText") == "theme: light"
    assert browser.run(colour) == light
    browser.run("location.reload()")
    browser.until("document.querySelector('#pulse.live')")
    assert browser.run(colour) == light, "the choice is kept"
    browser.click("#theme")
    assert browser.run(colour) == dark
    browser.click("#theme")
    browser.prefer("light")
    assert browser.run(colour) == light


def test_words_can_be_read_on_their_background_in_both_themes(browser, fake):
    look(browser, fake().url)
    for scheme in ["light", "dark"]:
        browser.prefer(scheme)
        weak = browser.run(
            """
            const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
                .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
                .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
            const parse = text => text.match(/[0-9.]+/g).map(Number);
            const behind = node => {
                for (; node; node = node.parentElement) {
                    const colour = parse(getComputedStyle(node).backgroundColor);
                    if (colour.length === 3 || colour[3] === 1) return colour;
                }
                return [255, 255, 255];
            };
            const weak = [];
            for (const node of document.querySelectorAll('body *')) {
                const own = [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
                if (!own || !node.checkVisibility() || node.closest('.hidden, .skip, svg')) continue;
                const colours = [parse(getComputedStyle(node).color), behind(node)];
                const [a, b] = colours.map(luminance).sort((x, y) => y - x);
                const contrast = (a + 0.05) / (b + 0.05);
                if (contrast < 4.5) weak.push(`${node.tagName}.${node.className}: ${contrast.toFixed(2)}`);
            }
            return [...new Set(weak)];
            """
        )
        assert weak == [], f"{scheme}: less than 4.5 to 1"


def test_a_server_that_is_gone_is_said_and_one_that_is_back_is_shown_again(browser, fake, serve):
    server = serve()
    look(browser, server.url)
    assert browser.run("return document.querySelector('#gone').hidden")
    server.process.kill()
    browser.until("!document.querySelector('#gone').hidden")
    said = browser.run("return document.querySelector('#gone').innerText")
    assert "does not answer. What you see is from " in said
    assert said.endswith("; trying again.")
    assert "no answer for" in browser.run("return document.querySelector('#pulse').innerText")
    browser.complaints()  # the browser itself complains about requests that failed

    first = fake()
    look(browser, first.url)
    first.stop()
    browser.until("!document.querySelector('#gone').hidden")
    fake(port=first.server.server_port)
    browser.until("document.querySelector('#gone').hidden && document.querySelector('#pulse.live')")


def test_a_thousand_waiters_and_five_thousand_keys_are_a_bounded_number_of_rows(browser, serve):
    server = serve()
    clients = [Wire(server.address) for _ in range(1000)]
    try:
        clients[0].set_many([(f"many/{number:05}", "x") for number in range(5000)])
        clients[0].set_many([(f"{number}/key", "x") for number in range(600)])
        for number, client in enumerate(clients):
            client.wait_for(f"never/{number}")
        look(browser, server.url)
        browser.until("document.querySelectorAll('#waiting-table tbody tr').length === 20")
        browser.run("document.querySelector('#keys').scrollIntoView()")  # what is hidden is not asked for
        browser.until("document.querySelectorAll('#keys-table tbody tr').length === 100")
        assert browser.run("return document.querySelector('#waiting-count').innerText") == "1,000 clients"
        browser.run("document.querySelector('#clients').open = true")
        browser.run("document.querySelector('#clients').scrollIntoView()")
        browser.until("document.querySelectorAll('#clients-table tbody tr').length === 100")
        assert nodes_of(browser) < 3000
        assert (
            browser.run("return document.querySelector('#waiting-more').innerText") == "show 80 more of 980"
        )
        browser.click("#waiting-more")
        browser.until("document.querySelectorAll('#waiting-table tbody tr').length === 100")
        assert nodes_of(browser) < 3500
    finally:
        for client in clients:
            client.close()
    assert browser.complaints() == []


def test_with_five_thousand_clients_and_a_hundred_thousand_keys_it_goes_on_under_load(browser, serve):
    files, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files_max < 6000:
        pytest.skip(f"{files_max} open files are allowed, which are too few for 5,000 clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # for the server too
    server = serve()
    clients = [Wire(server.address) for _ in range(5000)]
    stop = threading.Event()

    def work() -> None:
        with closing(Wire(server.address)) as client:
            while not stop.is_set():
                for number in range(100):
                    client.set(f"many/{number:06}", "y")
                client.ping()

    load = threading.Thread(target=work)
    try:
        for first in range(0, 100_000, 5000):
            clients[0].set_many([(f"many/{first + number:06}", "x") for number in range(5000)])
        clients[0].ping()
        load.start()
        look(browser, server.url)
        browser.run("document.querySelector('#keys').scrollIntoView()")  # what is hidden is not asked for
        browser.until("/^100,000,/.test(document.querySelector('#keys-count').innerText)")
        browser.run("document.querySelector('#clients').open = true")
        browser.run("document.querySelector('#clients').scrollIntoView()")
        browser.until("document.querySelector('#clients-count').innerText.includes('5,001')")
        browser.until("document.querySelectorAll('#clients-table tbody tr').length === 100")
        assert nodes_of(browser) < 3000
        path = "document.querySelector('#chart-operations path')?.getAttribute('d')"
        for _ in range(3):  # it goes on while the load does
            drawn = browser.until(path)
            browser.until(f"{path} !== args[0]", drawn)
        browser.click("#theme")  # and hears who uses it
        browser.until("document.querySelector('#theme').innerText !== 'theme: auto'")
        assert nodes_of(browser) < 3000
    finally:
        stop.set()
        if load.ident:
            load.join()
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files_max))
        browser.run("localStorage.clear()")
    assert browser.complaints() == []


def test_five_hundred_ranks_are_cells_and_a_click_tells_more(browser, fake):
    look(browser, fake(512, 8, 1000, 5000).url)
    assert browser.run("return document.querySelectorAll('.cell').length") == 512
    assert browser.run("return document.querySelectorAll('.cell.absent').length") == 1
    assert browser.run("return document.querySelector('.cell.absent').innerText") == "○5"
    first = browser.run("return document.querySelector('.ranks tbody tr').innerText")
    assert "5 on b0" in first
    assert "not joined" in first
    browser.click(".cell.absent")
    detail = browser.until(
        "[...document.querySelectorAll('dl.detail')].find(e => e.checkVisibility())?.innerText"
    )
    assert "node 0 · b0, local rank 5, pid 20005" in detail
    assert nodes_of(browser) < 4000
    browser.resize(360, 740, 2.0, phone=True)
    assert width_of(browser) == 360
    assert browser.complaints() == []


def test_it_has_headings_labels_and_no_script_or_style_in_the_page():
    page = Path(__file__).parents[2] / "crates" / "dashboard" / "src" / "page"
    html = (page / "index.html").read_text()
    assert "style=" not in html
    assert "onclick" not in html
    assert "http:" not in html
    assert "https:" not in html
    for line in html.splitlines():
        assert "<th" not in line or "scope=" in line, line
    code = (page / "app.js").read_text()
    for forbidden in [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
    ]:
        assert forbidden not in code
