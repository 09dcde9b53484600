#!/bin/sh
# Sees to it that FOLDER is a model, and ends: the default model unless something is mounted there.
set -eu
folder=$1
if [ -f "$folder/config.json" ] && [ ! -L "$folder" ]; then
  echo "model: $folder is the folder that was mounted"
  exit 0
fi
if [ -e "$folder" ] && [ ! -L "$folder" ]; then
  echo "model: $folder has no config.json; KV_MODEL must name a Hugging Face folder" >&2
  exit 1
fi
made=$(KVTIDE_CACHE=$(dirname "$folder") python -m kvtide.default_model)
ln -sfn "$(basename "$made")" "$folder"
echo "model: $folder is $made"
