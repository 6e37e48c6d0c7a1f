"""A bench of this project in serving mode (`BENCH_SERVE=1`): samples on demand."""

import os
import subprocess


class Ours:
    def __init__(self, binary):
        env = dict(os.environ, BENCH_SERVE="1")
        self.process = subprocess.Popen(
            [binary, "--bench"], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{binary} does not serve")

    def sample(self, request):
        """Microseconds of one launch of what the line `request` asks for."""
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        try:
            return float(answer)
        except ValueError:
            raise SystemExit(f"ours, {request}: {answer}") from None

    def close(self):
        self.process.communicate()
