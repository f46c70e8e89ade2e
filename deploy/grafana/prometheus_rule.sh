#!/bin/sh
# Prints alerts.yml as a PrometheusRule of the Prometheus operator, with your objectives:
#   TTFT=1.0 ITL=0.05 RUNBOOK=https://wiki.example.org/kvevict deploy/grafana/prometheus_rule.sh \
#     | kubectl apply --namespace monitoring -f -
# TTFT and ITL are seconds, and must be buckets of vLLM's histograms (le= on /metrics).
set -eu
rules="$(dirname "$0")/alerts.yml"
cat <<END
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: vllm-kvevict
  labels:
    release: kube-prometheus-stack
spec:
END
sed -e "s/le=\"2.5\"/le=\"${TTFT:=2.5}\"/" -e "s/more than 2.5 seconds/more than $TTFT seconds/" \
    -e "s/le=\"0.1\"/le=\"${ITL:=0.1}\"/" -e "s/more than 0.1 seconds/more than $ITL seconds/" \
    -e "s#https://runbooks.example.com/vllm-kvevict#${RUNBOOK:=https://runbooks.example.com/vllm-kvevict}#" \
    -e '/^#/d' -e 's/^/  /' "$rules"
