"""A real browser, driven over WebDriver: Debian's Chromium and its driver, by plain HTTP and JSON.

No package is needed for that, neither Python's nor Node's. The browser is headless, has a profile of its own
that is deleted, and does not contact its vendor. Tests wait for a condition in the page, never for a time.

`./test` installs both (Debian: chromium, chromium-driver).
"""

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 100.0  # reached only when a test fails
STARTS_MAX = 5  # of the driver
FLAGS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root in a container has none
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--force-color-profile=srgb",
]


def missing() -> str | None:
    """What is not installed here, if anything."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} (Debian: chromium chromium-driver)" if absent else None


class Browser:
    """One window of one browser."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tenfold-browser-", ignore_cleanup_errors=True)
        self.log = Path(self.folder.name) / "driver.log"
        self.session = ""
        try:
            self.url = f"http://127.0.0.1:{self._start_driver()}"
            self.session = self._open_session(width, height)
            self.open("about:blank")  # from the browser's own first page, whose requests are not ours
            self.requested()
        except BaseException:
            self.close()
            raise

    def _start_driver(self) -> int:
        """Its port. The port that it found free for IPv4 may be taken for IPv6: then it starts again."""
        for _ in range(STARTS_MAX):
            with self.log.open("wb") as log:
                # Killed with us however we end; the browser ends with the driver, whose pipe it reads.
                command = ["setpriv", "--pdeathsig", "KILL", "chromedriver", "--port=0"]
                self.driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            for line in self.driver.stdout:
                if "started successfully on port" in line:
                    return int(line.strip().rstrip(".").rpartition(" ")[2])
            self.driver.stdout.close()
            self.driver.wait()
        raise AssertionError(f"chromedriver did not start; it said:\n{self.log.read_text()}")

    def _open_session(self, width: int, height: int) -> str:
        flags = [*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={self.folder.name}/profile"]
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": flags},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        return f"/session/{answer['sessionId']}"

    def _ask(self, method: str, path: str, body: dict | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=2 * PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            said = json.load(error)["value"]
            raise AssertionError(f"{path}: {said['error']}: {said['message']}") from None

    def open(self, url: str) -> None:
        self._ask("POST", f"{self.session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function returns, run in the page."""
        return self._ask("POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, condition: str, *arguments: Any, patience: float = PATIENCE) -> Any:
        """Waits until the JavaScript expression is true in the page, and returns what it is."""
        # The page itself looks again and again: one round trip, and no moment is missed between two of them.
        script = """
            const [condition, values, patience, done] = arguments;
            const test = new Function("args", `return (${condition});`);
            const end = performance.now() + patience;
            const look = () => {
                let found = null;
                try { found = test(values); } catch (problem) { found = null; }
                if (found) done(found === true ? true : found);
                else if (performance.now() > end) done(null);
                else setTimeout(look, 20);
            };
            look();
        """
        self._ask("POST", f"{self.session}/timeouts", {"script": int(patience * 1000) + 10_000})
        body = {"script": script, "args": [condition, list(arguments), patience * 1000]}
        found = self._ask("POST", f"{self.session}/execute/async", body)
        assert found, (
            f"in {patience} s this did not become true: {condition}\nthe page says:\n{self.text()[:3000]}"
        )
        return found

    def text(self) -> str:
        return self.run("return document.body.innerText")

    def click(self, selector: str) -> None:
        """As a person does: the element must be there, in view and not covered."""
        using = {"using": "css selector", "value": selector}
        element = next(iter(self._ask("POST", f"{self.session}/element", using).values()))
        self._ask("POST", f"{self.session}/element/{element}/click", {})

    def press(self, selector: str, keys: str) -> None:
        using = {"using": "css selector", "value": selector}
        element = next(iter(self._ask("POST", f"{self.session}/element", using).values()))
        self._ask("POST", f"{self.session}/element/{element}/value", {"text": keys})

    def command(self, name: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol."""
        body = {"cmd": name, "params": parameters}
        return self._ask("POST", f"{self.session}/goog/cdp/execute", body)

    def resize(self, width: int, height: int, scale: float = 1.0, phone: bool = False) -> None:
        options = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.command("Emulation.setDeviceMetricsOverride", **options)

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system would say."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._ask("GET", f"{self.session}/screenshot")))

    def complaints(self) -> list[str]:
        """What the console got since last asked, errors and warnings alike."""
        entries = self._ask("POST", f"{self.session}/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]

    def requested(self) -> list[str]:
        """The address of every request of the page since last asked."""
        entries = self._ask("POST", f"{self.session}/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        sent += [one["params"] for one in messages if one["method"] == "Network.webSocketCreated"]
        return [one["request"]["url"] if "request" in one else one["url"] for one in sent]

    def close(self) -> None:
        if getattr(self, "session", ""):
            with suppress(AssertionError, OSError):  # it is ended below, whatever it answers
                self._ask("DELETE", self.session)
        self.driver.terminate()
        try:
            self.driver.wait(10)
        except subprocess.TimeoutExpired:
            self.driver.kill()
            self.driver.wait()
        self.driver.stdout.close()
        self.folder.cleanup()

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
