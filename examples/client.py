"""A client from the .proto alone: stream an answer with plain grpcio.

    python examples/client.py 127.0.0.1:PORT "Hello"

The stubs are generated from `proto/latentmesh/v1/inference.proto`; here the copy that ships with
Latentmesh is used. Text needs a checkpoint with a tokenizer.
"""

from __future__ import annotations

import sys

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cluster.api.generated.latentmesh.v1 import inference_pb2, inference_pb2_grpc


def main(address: str, text: str) -> int:
    """Print the answer to `text` as it comes."""
    request = inference_pb2.GenerateRequest(
        text=text,
        max_tokens=48,
        sampling=inference_pb2.SamplingParams(temperature=0.7, seed=1),
    )
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            for response in stub.Generate(request, timeout=60):
                if response.WhichOneof("event") == "chunk":
                    sys.stdout.write(repr(response.chunk.text)[1:-1])
                    sys.stdout.flush()
                else:
                    reason = inference_pb2.FinishReason.Name(response.finished.finish_reason)
                    usage = response.finished.usage
                    sys.stdout.write(f"\n{reason}, {usage.output_tokens} tokens\n")
        except grpc.RpcError as error:
            sys.stderr.write(f"{error.code().name}: {error.details()} {reasons(error)}\n")
            return 1
    return 0


def reasons(error: grpc.RpcError) -> list[str]:
    """Stable reasons of an error (docs/consumers/errors.md); none for those made by grpcio."""
    status = rpc_status.from_call(error)
    found = []
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            found.append(info.reason)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
