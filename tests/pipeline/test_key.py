import subprocess, sys, torch
from torch._inductor import codecache
def go(out):
    torch.set_num_threads(1)
    orig = codecache.FxGraphCache.prepare_key
    real = codecache.compiled_fx_graph_hash
    def wrap(*a, **k):
        r = real(*a, **k); open(out,"a").write("\n".join(r[1])+"\n====\n"); return r
    codecache.compiled_fx_graph_hash = wrap
    from streamdiff.pipeline.torch_compile import one_graph
    f = one_graph(lambda x: x.sin() + 1)
    with torch.inference_mode():
        f(torch.ones(64))
def test_key():
    go("/tmp/hc/k1")
    subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0,'/tmp/hc'); import test_key; test_key.go('/tmp/hc/k2')"], check=True)
