# tritonfp8 on a GPU machine with NVIDIA's container toolkit, and README's commands in it:
#   docker build --tag tritonfp8 .
#   docker run --gpus all --rm tritonfp8                                     # trains a small model in bf16 and in FP8
#   docker run --gpus all --rm tritonfp8 tritonfp8 doctor                    # what this machine can run
#   docker build --target tests --tag tritonfp8-tests . && docker run --gpus all --rm --shm-size 8g tritonfp8-tests
# The image has the torch of constraints.txt, which pip therefore keeps, and the C compiler that Triton needs.
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel AS checkout
# The image is one environment: its Python belongs to the distribution, and pip would refuse to add to it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
# Put a volume there to keep what was compiled and tuned (docs/environment.md).
ENV XDG_CACHE_HOME=/caches TRITON_CACHE_DIR=/caches/triton TORCHINDUCTOR_CACHE_DIR=/caches/inductor
WORKDIR /tritonfp8
COPY . .

FROM checkout AS tests
RUN pip install -c constraints.txt -e ".[dev]"
CMD ["pytest"]

FROM checkout AS train
RUN pip install -c constraints.txt -e ".[train]"
CMD ["tritonfp8", "train"]
