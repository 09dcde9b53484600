#!/bin/sh
# A storage replica, under an identity of its own that a new container of the same replica keeps: "storage-2" for
# kvtide-storage-2. Docker's DNS knows that name by the address (/etc/hosts knows the container's id, which changes).
# Arguments go to the service.
set -eu
address=$(hostname -i)
name=$(getent -s dns hosts "${address%% *}" | awk '{ print $2 }') || name=""
name=${name%%.*}
replica=${name##*-}
case $replica in
  "" | *[!0-9]*) replica=$(hostname) ;;
esac
exec python -m services.storage --identity "storage-$replica" "$@"
