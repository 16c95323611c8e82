"""What a server does at the moment, from its metrics: for more than a look there is Prometheus."""

import re
import urllib.request

with urllib.request.urlopen("http://localhost:8000/metrics") as response:
    text = response.read().decode()
for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total"):
    value = re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)
    print(f"{name:<26} {value[1] if value else 'unknown'}")
