"""Scratch."""
import sys, json, tempfile, time
from importlib import import_module
from pathlib import Path
from tests.cases.case import verdict_of, grade
from tests.cases.recordings import Recordings
def main():
    with Recordings(Path(tempfile.mkdtemp())) as r:
        for n in sys.argv[1:]:
            case = import_module(f"tests.cases.{n}" if not n.isdigit() else f"tests.cases.case_{n}").CASE
            b, t, w = (r.of(case, v) for v in ("baseline", "target", "twin"))
            v = verdict_of(b, t)
            f = v["first_divergence"] or {}
            print(n, {k: f.get(k) for k in ("step","microbatch","phase","kind","boundary","operator","role","slot","moment","call","ranks","inputs_equal")})
            print("   ", f.get("explanation"), "| producer", f.get("producer"), "| group", f.get("group"))
            print("    concurrent", [(c["boundary"], c["role"], c["slot"], c["ranks"]) for c in v["concurrent"]][:4], len(v["concurrent"]))
            print("    ", v["verdict"], "WRONG", {k: val for k, val in grade(case, v).items() if not val}, v["notes"])
            print("    twin", verdict_of(b, w)["verdict"], (verdict_of(b, w)["first_divergence"] or {}).get("explanation"))
if __name__ == "__main__":
    main()
