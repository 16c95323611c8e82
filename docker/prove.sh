#!/usr/bin/env bash
# Builds the image without Docker and proves that it serves: buildah on a base made by debootstrap, then the image's own
# command, health check and user, a chat with the demo model, and an orderly end. For Debian, as root, 10 GB of disk.
#
#   docker/prove.sh                    # torch from PyPI, with CUDA: several GB
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu docker/prove.sh
#
# The environment's PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS and PIP_CERT hold for the build too, and folders
# and files that they name are mounted. The base is the machine's own Debian, from the mirror that its apt has, unless
# DEBIAN_SUITE and DEBIAN_MIRROR say otherwise. VSERVE_PORT chooses a port, WORK a folder that is kept. It takes about ten
# minutes for the CPU alone; `make test-all` runs it where buildah is, and .ci/run with FULL=1.
set -euo pipefail
cd "$(dirname "$0")/.."
SUITE=${DEBIAN_SUITE:-$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)}
MIRROR=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Identifier: Packages' |
  awk -v suite="$SUITE" '$2 == suite && !found { print $1; found = 1 }')}
[[ -n $MIRROR ]] || { echo "apt has no source of '$SUITE': name one, DEBIAN_MIRROR=http://…" >&2 && exit 1; }
PORT=${VSERVE_PORT:-18000}
IMAGE=localhost/vserve
unset VSERVE_PORT

say() { printf '\n== %s (%d s) ==\n' "$*" "$SECONDS"; }

if ! { command -v buildah && command -v debootstrap && command -v python3 && command -v pgrep; } >/dev/null; then
  say "Installing buildah and debootstrap"
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    buildah debootstrap python3 procps ca-certificates
fi

work=${WORK:-$(mktemp -d)}
mkdir -p "$work"
server=
finish() {
  if [[ -n $server ]]; then kill -KILL -- "-$server" 2>/dev/null || true; fi
  [[ -n ${WORK:-} ]] || rm -rf --one-file-system "$work"
}
trap finish EXIT
# No daemon, no overlay, no runtime: everything in this folder, commands in a chroot.
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot TMPDIR=$work
export CONTAINERS_STORAGE_CONF=$work/storage.conf REGISTRY_AUTH_FILE=$work/auth.json
printf '[storage]\ndriver = "vfs"\nrunroot = "%s/run"\ngraphroot = "%s/images"\n' "$work" "$work" >"$CONTAINERS_STORAGE_CONF"
printf '{}' >"$REGISTRY_AUTH_FILE"
printf '{"default": [{"type": "insecureAcceptAnything"}]}\n' >"$work/policy.json"
signature=(--signature-policy "$work/policy.json")

if ! buildah inspect --type image "$IMAGE-base" >/dev/null 2>&1; then
  say "Making a base with debootstrap: $SUITE from $MIRROR"
  rm -rf "$work/base"
  debootstrap --variant=minbase "$SUITE" "$work/base" "$MIRROR"
  rm -rf "$work"/base/var/cache/apt/archives/*.deb "$work"/base/var/lib/apt/lists/*
  base=$(buildah from "${signature[@]}" scratch)
  buildah add --quiet "$base" "$work/base" / >/dev/null
  buildah commit "${signature[@]}" --quiet --format docker "$base" "$IMAGE-base" >/dev/null
  buildah rm "$base" >/dev/null
  rm -rf "$work/base"
fi

say "Building the image"
options=()
for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT; do
  value=${!name:-}
  [[ -n $value ]] || continue
  path=${value#file://}
  if [[ -e $path ]]; then # at a place of its own: installing ca-certificates must not find one of its files mounted
    options+=(--volume "$path:/mnt/$name:ro")
    value=/mnt/$name
  fi
  options+=(--build-arg "$name=$value")
done
buildah bud "${signature[@]}" --format docker --build-arg "BASE_IMAGE=$IMAGE-base" "${options[@]}" -t "$IMAGE" .

# The image's own words: what Docker would run, and as whom.
configuration=$(buildah inspect --type image "$IMAGE")
words() { python3 -c "import json, sys; print(*json.load(sys.stdin)['Docker']['config']$1, sep='\n')" <<<"$configuration"; }
mapfile -t entrypoint < <(words "['Entrypoint']")
mapfile -t health < <(words "['Healthcheck']['Test'][1:]")
user=$(words "['User'].split()")
container=$(buildah from "${signature[@]}" "$IMAGE")
inside() { buildah run --isolation chroot "$container" -- "$@"; }

say "Running: ${entrypoint[*]} --port $PORT, as $user"
[[ $(inside id -un) == "$user" && $user != root ]]
inside "${entrypoint[@]}" doctor --port "$PORT"
set -m  # a process group of its own, so that the signal reaches the server and not this script
inside "${entrypoint[@]}" --port "$PORT" &
server=$!
set +m
healthy=
for _ in $(seq 120); do
  if inside "${health[@]}" 2>/dev/null; then healthy=yes && break; fi
  kill -0 "$server" || break
  sleep 1
done
[[ -n $healthy ]] || { echo "the health check never succeeded" >&2 && exit 1; }
echo "the health check succeeds"

say "A chat"
answer=$(inside "${entrypoint[@]}" chat --url "http://127.0.0.1:$PORT/v1" --quick "What is 12 + 30?")
echo "What is 12 + 30? $answer"
[[ $answer == 42 ]]
compiler=$(inside sh -c 'echo "#include <Python.h>
int main(void) { return 0; }" > /tmp/t.c && gcc -I$(python3 -c "import sysconfig; print(sysconfig.get_paths(\"posix_prefix\")[\"include\"])") -c /tmp/t.c -o /tmp/t.o && echo works')
echo "the C compiler, for Triton: $compiler"

say "SIGTERM"
kill -TERM "$(pgrep -o -f "^/opt/vserve/bin/python[0-9.]* /opt/vserve/bin/vserve --port $PORT")"
code=0
wait "$server" || code=$?
server=
echo "the server ends with exit code $code"
[[ $code == 0 ]]

say "Size and layers"
buildah images --format '{{.Name}} {{.Size}}' | grep -- "^$IMAGE "
buildah push "${signature[@]}" --quiet "$IMAGE" "dir:$work/image"
python3 - "$work/image" <<'PYTHON'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
manifest = json.loads((folder / "manifest.json").read_text())
config = json.loads((folder / manifest["config"]["digest"].removeprefix("sha256:")).read_text())
print("compressed layers:", ", ".join(f"{layer['size'] / 1e6:.1f} MB" for layer in manifest["layers"]))
for step in config["history"]:
    print("  ", " ".join(step.get("created_by", "").split())[:150])
PYTHON
say "Proved"
