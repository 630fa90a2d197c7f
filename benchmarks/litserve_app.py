"""The same model and preparation of photos in LitServe, for `benchmarks/serve.py --beside`:

python benchmarks/litserve_app.py PORT WORKERS
"""

import sys

import litserve
import torch

import patchlight as pl


class Finder(litserve.LitAPI):
    def setup(self, device):
        torch.set_num_threads(1)
        self.loaded = pl.load("default")

    def decode_request(self, request):
        return request["photo"].file.read()

    def predict(self, content):
        return pl.localize(content, self.loaded)

    def encode_response(self, found):
        boxes = [[each.box.left, each.box.top, each.box.right, each.box.bottom] for each in found.subjects]
        return {"decision": found.decision, "confidence": found.confidence, "boxes": boxes}


if __name__ == "__main__":
    server = litserve.LitServer(Finder(), accelerator="cpu", workers_per_device=int(sys.argv[2]), timeout=120)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error")
