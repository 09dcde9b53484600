#!/bin/sh
# A storage replica, under an identity of its own that a new container of the same replica keeps: "storage-2" for
# kvtide-storage-2, "storage_lmcache-1" for kvtide-storage_lmcache-1. Docker's DNS knows that name by the address (/etc/hosts knows the container's id, which changes).
# Arguments go to the service.
set -eu
address=$(hostname -i)
name=$(getent -s dns hosts "${address%% *}" | awk '{ print $2 }') || name=""
name=${name%%.*}
replica=${name##*-}
service=${name%-*}
service=${service##*-}
case $replica in
  "" | *[!0-9]*) replica=$(hostname) service=storage ;;
esac
exec python -m services.storage --identity "$service-$replica" "$@"
