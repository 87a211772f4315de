# memfit on any machine that runs linux/amd64 containers; no GPU is needed.
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# A user of its own: the built stub is kept in that user's cache.
RUN useradd --create-home memfit
USER memfit
WORKDIR /home/memfit/memfit

COPY --chown=memfit . .
RUN ./run.sh setup && .venv/bin/pip cache purge

ENV PATH=/home/memfit/memfit/.venv/bin:$PATH
CMD ["./run.sh"]
