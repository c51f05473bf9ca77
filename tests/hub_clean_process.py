"""Run in a process of its own, where gated_llama cannot be imported: loads every folder of ROOT as remote code.

From a worker thread, without a terminal, offline. For each folder: the outputs, then a second generation saved and
loaded again. Results go to ROOT/results.pt, for the test to compare.
"""

import sys
import threading
from pathlib import Path

import torch
import transformers


sys.modules["gated_llama"] = None  # importing it raises ImportError, wherever it is installed


def outputs(model, ids):
    found = model(ids)
    return next(getattr(found, name) for name in ("logits", "start_logits", "last_hidden_state") if name in found)


def examine(folder: Path, auto_class: str, again: Path) -> dict:
    auto = getattr(transformers, auto_class)
    ids = torch.load(folder.parent / "ids.pt")
    first = auto.from_pretrained(folder, trust_remote_code=True).eval()
    first.save_pretrained(again)
    second = auto.from_pretrained(again, trust_remote_code=True).eval()
    decoder = first if auto_class == "AutoModel" else first.model
    with torch.no_grad():
        return {
            "first": outputs(first, ids),
            "second": outputs(second, ids),
            "scores": decoder(ids, output_gate_scores=True).gate_scores,
            "modules": [type(module).__module__ for module in (first, second, first.config)],
        }


def main(root: Path):
    torch.set_num_threads(1)  # as in the tests: sums in another order are not equal to the last bit
    results = {}
    for folder in sorted(root.glob("Auto*")):
        auto_class = folder.name.split("-")[0]
        try:
            results[folder.name] = examine(folder, auto_class, root / "again" / folder.name)
        except Exception as error:
            results[folder.name] = {"error": f"{type(error).__name__}: {error}"}
    # Folders whose code differs, in turn, and at last one that shares its name with another.
    ids = torch.load(root / "ids.pt")
    for name in ("edited/1", "edited/2", "edited/1", "edited/2", "twin/2"):
        model = transformers.AutoModelForCausalLM.from_pretrained(root / name, trust_remote_code=True).eval()
        results.setdefault("edited", []).append(model(ids).logits.detach())
        model.save_pretrained(root / "again" / name)
    torch.save(results, root / "results.pt")


if __name__ == "__main__":
    sys.stdin.close()
    worker = threading.Thread(target=main, args=(Path(sys.argv[1]),))
    worker.start()
    worker.join()
