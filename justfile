# Verbs only; CI runs `just ci`'s recipe through .ci/run.

build:
    cargo build --release

demo:
    cargo build --release && target/release/oxide-lab demo

test:
    cargo test --release --workspace

lint:
    cargo fmt --check
    cargo clippy --workspace --all-targets -- -D warnings

docs:
    RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --workspace

# Rewrites THIRD_PARTY_NOTICES.md and other generated files that tests compare.
bless:
    OXIDE_BLESS=1 cargo test --release -p oxide-testkit --test notices

# Rebuilds every sm90 kernel and compares hashes; needs no GPU.
kernels-check:
    python3 kernels/build.py --check

ci:
    .ci/run
