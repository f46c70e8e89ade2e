#!/bin/sh
# Reads manifests, gives every engine time to finish its streams, writes manifests. A filter after
# `helm template`, and a --post-renderer of Helm 3. Needs kubectl.
set -eu
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cp "$(dirname "$0")/drain/kustomization.yaml" "$folder/"
cat >"$folder/rendered.yaml"
kubectl kustomize "$folder"
