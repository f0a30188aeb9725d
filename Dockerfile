# docker build -t pimflow . && docker run --rm -v "$PWD:/work" pimflow compile mobilenet-v2 -o build/mobilenet-v2
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /pimflow
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /pimflow

FROM python:3.12-slim
# Compiled networks are linked by a C++ compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["pimflow"]
