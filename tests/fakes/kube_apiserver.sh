#!/usr/bin/env bash
# Runs a command beside a real API server: etcd and kube-apiserver on 127.0.0.1 (the server on
# $FORGE_KUBE_ADDRESS where that is set), RBAC on, nothing else of a cluster. `make k8s-apiserver` runs the tests of plugins/cluster/hosts/kubernetes.py so.
#
#   tests/fakes/kube_apiserver.sh COMMAND [ARGUMENT...]
#
# The command finds admin.yaml and controller.yaml, two kubeconfigs, in $FORGE_KUBE_APISERVER. The
# second is of the account that the manifests give the controller, in the namespace $FORGE_KUBE_SPACE.
# With $FORGE_KUBE_CONTROLLERS set, kube-controller-manager runs too, and gives up a silent node after
# ten seconds. All of it is gone at the end.
set -euo pipefail

missing=()
for tool in etcd kube-apiserver openssl ${FORGE_KUBE_CONTROLLERS:+kube-controller-manager}; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
if ((${#missing[@]})); then
  echo "not on PATH: ${missing[*]}; put the binaries of a Kubernetes release there" \
    "(kube-apiserver 1.20 or later, etcd 3.4 or later)" >&2
  exit 3
fi

dir=$(mktemp -d)
pids=()
cleanup() {
  # At once: a server whose store has gone takes a minute to end by itself.
  ((${#pids[@]})) && kill -KILL "${pids[@]}" 2>/dev/null
  wait 2>/dev/null || true
  rm -rf "$dir"
}
trap cleanup EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
store=$(free_port) peer=$(free_port) port=$(free_port)

address=${FORGE_KUBE_ADDRESS:-127.0.0.1}

cd "$dir"
{
  openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=forge-test-ca -keyout ca.key -out ca.crt
  openssl req -newkey rsa:2048 -nodes -subj /CN=kube-apiserver -keyout tls.key -out tls.csr
  openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out tls.crt \
    -extfile <(echo "subjectAltName=IP:$address")
  openssl genrsa -out accounts.key 2048
} >openssl.log 2>&1

space=${FORGE_KUBE_SPACE:-forge-three-channels}
admin=$(openssl rand -hex 16) controller=$(openssl rand -hex 16)
umask 077
cat >tokens.csv <<END
$admin,admin,1,"system:masters"
$controller,system:serviceaccount:$space:forge-controller,2,"system:serviceaccounts,system:authenticated"
END
for user in admin controller; do
  cat >"$user.yaml" <<END
apiVersion: v1
kind: Config
current-context: test
clusters:
- name: real
  cluster: {server: "https://$address:$port", certificate-authority-data: $(base64 -w0 ca.crt)}
users:
- name: me
  user: {token: ${!user}}
contexts:
- name: test
  context: {cluster: real, user: me}
END
done

etcd --data-dir etcd --listen-client-urls "http://127.0.0.1:$store" \
  --advertise-client-urls "http://127.0.0.1:$store" --listen-peer-urls "http://127.0.0.1:$peer" \
  >etcd.log 2>&1 &
pids+=($!)
kube-apiserver --etcd-servers "http://127.0.0.1:$store" --bind-address "$address" --advertise-address "$address" \
  --secure-port "$port" --tls-cert-file tls.crt --tls-private-key-file tls.key --cert-dir certs \
  --authorization-mode RBAC --token-auth-file tokens.csv --service-cluster-ip-range 10.0.0.0/24 \
  --service-account-key-file accounts.key --service-account-signing-key-file accounts.key \
  --default-not-ready-toleration-seconds 2 --default-unreachable-toleration-seconds 2 \
  --service-account-issuer https://kubernetes.default.svc >kube-apiserver.log 2>&1 &
pids+=($!)

for _ in $(seq 120); do
  # The roles that every cluster begins with are made last.
  if curl -sf --cacert ca.crt -H "Authorization: Bearer $admin" \
    "https://$address:$port/readyz" >/dev/null; then ready=1; break; fi
  kill -0 "${pids[@]}" 2>/dev/null || break
  sleep 0.5
done
if [[ -z ${ready:-} ]]; then
  echo "the API server did not become ready:" >&2
  tail -n 20 etcd.log kube-apiserver.log >&2
  exit 4
fi
if [[ -n ${FORGE_KUBE_CONTROLLERS:-} ]]; then
  kube-controller-manager --kubeconfig admin.yaml --leader-elect=false --cert-dir certs \
    --bind-address 127.0.0.1 --use-service-account-credentials=false --root-ca-file ca.crt \
    --service-account-private-key-file accounts.key --node-monitor-period 1s \
    --node-monitor-grace-period 10s >kube-controller-manager.log 2>&1 &
  pids+=($!)
fi

cd - >/dev/null
FORGE_KUBE_APISERVER=$dir "$@"
