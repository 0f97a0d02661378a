# fledge serve on a CPU.
#   docker build -t fledge .
#   docker run --rm -p 8000:8000 -v fledge-cache:/home/fledge/.cache fledge MODEL --api-key SECRET
FROM python:3.13-slim

WORKDIR /src
COPY pyproject.toml MANIFEST.in README.md LICENSE constraints.txt ./
COPY fledge fledge
# torch for CPUs. ziglang is the C compiler: the CPU kernels are compiled for the machine that runs the container, on first use.
# xgrammar without its dependencies, which name Triton.
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[native]" \
    && pip install --no-cache-dir --constraint constraints.txt --no-deps xgrammar apache-tvm-ffi \
    && rm -rf /src/build \
    && useradd --create-home --uid 1000 fledge

USER 1000
WORKDIR /home/fledge
# Models and compiled kernels; made here, so that a volume belongs to the user.
RUN mkdir .cache
VOLUME /home/fledge/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["fledge", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["smollm2-135m"]
