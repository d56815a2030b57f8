"""A program that is started like ``vllm serve``: serves health, has a child, shared memory."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

_PROGRAM = '''
    #!{python}
    import _multiprocessing, mmap, os, signal, subprocess, sys, textwrap, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from multiprocessing import resource_tracker

    arguments = sys.argv[1:]
    if "--die" in arguments:
        sys.exit("nothing works here")
    # As an engine's process: it hears of no end but SIGKILL, and the tracker lasts until then.
    child_code = """
    import mmap, os, signal, sys, time
    def share(*_):
        global memory
        with open(sys.argv[1] + "-new", "wb+") as file:
            file.truncate(4096)
            memory = mmap.mmap(file.fileno(), 4096)
        os.rename(sys.argv[1] + "-new", sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, share)
    print("ready", flush=True)
    while True:
        time.sleep(600)
    """
    shared_at_the_end = f"/dev/shm/kvferry-test-{{os.getpid()}}-late"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(child_code), shared_at_the_end],
        pass_fds=[resource_tracker.getfd()],
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    # A semaphore that no process has mapped: only Python's resource tracker knows of it.
    semaphore = f"/kvferry-test-{{os.getpid()}}"
    _multiprocessing.SemLock(1, 1, 1, semaphore, False)
    resource_tracker.register(semaphore, "semaphore")
    name = f"/dev/shm/kvferry-test-{{os.getpid()}}"
    with open(name, "wb+") as file:
        file.truncate(4096)
        memory = mmap.mmap(file.fileno(), 4096)


    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass


    def end(*_):
        # As one that is told to end while its engine still starts, and shares ever more.
        child.send_signal(signal.SIGUSR1)
        while not os.path.exists(shared_at_the_end):
            time.sleep(0.01)
        os._exit(0)


    signal.signal(signal.SIGTERM, end)
    port = int(arguments[arguments.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()
'''


def pretend_vllm(folder: Path) -> Path:
    """Write an environment's Python and its ``vllm``; return the Python."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "python"
    python.symlink_to(sys.executable)
    program = folder / "vllm"
    program.write_text(textwrap.dedent(_PROGRAM).strip().format(python=sys.executable) + "\n")
    program.chmod(0o755)
    return python
