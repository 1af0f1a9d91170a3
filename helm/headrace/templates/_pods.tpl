{{/* MiB of /dev/shm in a pod; an arena is in pods with workers only. Call with dict root, withArena, pods. */}}
{{- define "headrace.sharedMemoryMb" -}}
{{- $shared := .root.Values.sharedMemory -}}
{{- $mebibytes := add (int64 $shared.objectStoreMb) (int64 $shared.marginMb) (ternary (int64 .root.Values.settings.arena_mb) 0 .withArena) -}}
{{- $memory := include "headrace.memoryLimit" .pods -}}
{{- $limit := include "headrace.mebibytes" $memory | int64 -}}
{{- if and (gt $limit 0) (le $limit (int64 $mebibytes)) -}}
{{- fail (printf "%s: resources.limits.memory is %s, and /dev/shm alone takes %d MiB (settings.arena_mb + sharedMemory)" .component $memory $mebibytes) -}}
{{- end -}}
{{ $mebibytes }}
{{- end -}}

{{/* Where the index is, from values and secrets. */}}
{{- define "headrace.redisEnvironment" -}}
{{- $values := .Values -}}
{{- if $values.redis.passwordSecret.name }}
- name: HEADRACE_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $values.redis.passwordSecret.name }}
      key: {{ $values.redis.passwordSecret.key }}
{{- end }}
{{- $external := eq $values.redis.mode "external" }}
{{- if and $external $values.redis.external.usernameSecret.name }}
- name: HEADRACE_REDIS_USERNAME
  valueFrom:
    secretKeyRef:
      name: {{ $values.redis.external.usernameSecret.name }}
      key: {{ $values.redis.external.usernameSecret.key }}
{{- end }}
- name: HEADRACE_REDIS_URL
  {{- if and $external $values.redis.external.urlSecret.name }}
  valueFrom:
    secretKeyRef:
      name: {{ $values.redis.external.urlSecret.name }}
      key: {{ $values.redis.external.urlSecret.key }}
  {{- else }}
  value: {{ include "headrace.redisUrl" . | quote }}
  {{- end }}
{{- end -}}

{{/* By which Ray's own connections speak TLS. */}}
{{- define "headrace.rayTls" -}}
- name: RAY_USE_TLS
  value: "1"
- name: RAY_TLS_SERVER_CERT
  value: /etc/headrace/tls/ray/cert.pem
- name: RAY_TLS_SERVER_KEY
  value: /etc/headrace/tls/ray/key.pem
- name: RAY_TLS_CA_CERT
  value: /etc/headrace/tls/ray/ca.pem
{{- end -}}

{{/* Makes the pod's certificates, which name the address by which others call the pod; nobody knows it before. It runs as
long as the pod and renews what Headrace's parts go by; Ray reads its own once. Only this container reads the
authority's private key. */}}
{{- define "headrace.certificateContainer" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $tls := $values.tls -}}
- name: certificates
  image: {{ include "headrace.image" $root | quote }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  restartPolicy: Always
  securityContext:
    {{- include "headrace.containerSecurity" $root | nindent 4 }}
  env:
    - name: POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
  workingDir: /etc/headrace/tls
  command:
    - /bin/sh
    - -c
    - |
      umask 077
      trap 'exit 0' TERM
      # A new set of files beside the old one, then a link that is turned to it: who reads gets one or the other, whole.
      # The authority's key is a link, too, which leads nowhere in other containers.
      renew() {
        find . -maxdepth 1 -name "$1.*" ! -name "$(readlink "$1")" -exec rm -r {} + &&
          test -r /etc/headrace/authority/{{ $tls.authoritySecret.privateKey }} &&
          made=$(mktemp -d "$1.XXXXXXXX") &&
          cp /etc/headrace/authority/{{ $tls.authoritySecret.certificate }} "$made/ca.pem" &&
          ln -s /etc/headrace/authority/{{ $tls.authoritySecret.privateKey }} "$made/ca.key" &&
          headrace certs create "$made" --days "$2" --host "$POD_IP" --host localhost --host 127.0.0.1 \
            --host "*.{{ $root.Release.Namespace }}.svc" --host "*.{{ $root.Release.Namespace }}.svc.{{ $tls.clusterDomain }}" &&
          ln -sfn "$made" "$1.link" && mv -T "$1.link" "$1"
      }
      [ -e ray/key.pem ] || renew ray {{ int $tls.rayDays }} || exit 1
      # Also when the container starts again: a set that is there does not say when the next one is due.
      while true; do
        until renew parts {{ int $tls.days }}; do
          [ -e parts/key.pem ] || exit 1
          echo "no new certificate; the one that there is stays until it expires, and another is tried in 10 minutes" >&2
          sleep 600 & wait $!
        done
        sleep {{ mul (int $tls.days) 28800 }} & wait $!
      done
  # The containers after it start when both sets are there.
  startupProbe:
    exec:
      command: [test, -e, /etc/headrace/tls/parts/key.pem]
    periodSeconds: 1
    timeoutSeconds: {{ $values.probes.timeoutSeconds }}
    failureThreshold: {{ max 1 (int $values.probes.startupSeconds) }}
  resources:
    requests:
      cpu: 10m
      memory: 32Mi
    limits:
      memory: 256Mi
  volumeMounts:
    - name: authority
      mountPath: /etc/headrace/authority
      readOnly: true
    - name: tls
      mountPath: /etc/headrace/tls
{{- end -}}

{{/* Environment that all Ray processes share. */}}
{{- define "headrace.environment" -}}
{{- $values := .Values -}}
- name: HOME
  value: /home/headrace
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- if $values.ray.gcsFaultTolerance }}
# How long a pod goes on by itself while the head is away.
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
{{- end }}
- name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH
  value: headrace_cluster.proxy_http.middlewares
# Serve's gRPC proxies take messages of 2 GiB from anybody unless this says what they take.
- name: RAY_SERVE_GRPC_MAX_MESSAGE_SIZE
  value: "16777216"
{{- range $name, $value := dict "OMP_WAIT_POLICY" "passive" "GOMP_SPINCOUNT" "10000" "KMP_BLOCKTIME" "0" "THP_MEM_ALLOC_ENABLE" "1" "TOKENIZERS_PARALLELISM" "false" }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- include "headrace.redisEnvironment" . | trim | nindent 0 }}
{{- if and $values.ray.gcsFaultTolerance (include "headrace.redisTls" .) $values.redis.external.caSecret.name }}
- name: RAY_REDIS_CA_CERT
  value: /etc/headrace/redis-ca/{{ $values.redis.external.caSecret.key }}
{{- end }}
{{- if $values.tls.authoritySecret.name }}
{{ include "headrace.rayTls" . }}
{{- end }}
{{- if $values.model.hub.enabled }}
{{- if $values.model.hub.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $values.model.hub.tokenSecret.name }}
      key: {{ $values.model.hub.tokenSecret.key }}
{{- end }}
{{- else }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end -}}

{{/* The template of one kind of Ray pod. Call with dict root, component, pods (their values), withArena, gpus. */}}
{{- define "headrace.podTemplate" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $pods := .pods -}}
{{- $isHead := eq .component "head" -}}
{{- $isGateway := eq .component (include "headrace.gatewayComponent" $root) -}}
{{- $sharedMb := include "headrace.sharedMemoryMb" . -}}
{{- $resources := deepCopy ($pods.resources | default dict) -}}
{{- if gt (int .gpus) 0 -}}
{{- $resources = set $resources "limits" (set ($resources.limits | default dict) "nvidia.com/gpu" (toString .gpus)) -}}
{{- end -}}
metadata:
  labels:
    {{- include "headrace.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- with $pods.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if and $isHead (include "headrace.autoscaling" $root) }}
  # KubeRay gives the head a service account with the rights of its autoscaler, whose container needs the token.
  automountServiceAccountToken: true
  {{- else }}
  serviceAccountName: {{ include "headrace.serviceAccount" $root }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "headrace.graceSeconds" . }}
  securityContext:
    {{- include "headrace.podSecurity" $root | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $pods.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pods.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $pods.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pods.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pods.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $values.topologySpread.enabled (not $isHead) }}
  topologySpreadConstraints:
    - maxSkew: {{ $values.topologySpread.maxSkew }}
      topologyKey: {{ $values.topologySpread.topologyKey }}
      whenUnsatisfiable: {{ $values.topologySpread.whenUnsatisfiable }}
      # Each cluster by itself: the one that it replaces is gone soon.
      matchLabelKeys: [ray.io/cluster]
      # Nodes whose taints the pods do not tolerate, such as gateways' those of GPU nodes, are no places that stay empty.
      nodeTaintsPolicy: Honor
      labelSelector:
        matchLabels:
          {{- include "headrace.selector" $root | nindent 10 }}
          app.kubernetes.io/component: {{ .component }}
  {{- end }}
  {{- if $values.tls.authoritySecret.name }}
  initContainers:
    {{- include "headrace.certificateContainer" . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $isHead }}
      image: {{ include "headrace.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "headrace.containerSecurity" $root | nindent 8 }}
      env:
        {{- include "headrace.environment" $root | nindent 8 }}
        {{- if and .withArena $values.tenants.secretName }}
        # An admin's, by which the pod drains its store node when it is to end.
        - name: HEADRACE_API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ $values.tenants.adminKeySecret.name }}
              key: {{ $values.tenants.adminKeySecret.key }}
        {{- end }}
      ports:
        {{- $first := include "headrace.metricsPort" $root | int }}
        {{- range $number := until (include "headrace.partsInPod" . | int) }}
        - name: metrics-{{ $number }}
          containerPort: {{ add $first $number }}
        {{- end }}
        {{- if $isHead }}
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        - name: client
          containerPort: 10001
        {{- end }}
        {{- if or $isHead $isGateway }}
        # On the head also where no gateway is: some KubeRay versions take the port of their Service from there, and bring
        # no cluster into service without it.
        - name: serve
          containerPort: 8000
        {{- end }}
        {{- if $isGateway }}
        - name: grpc
          containerPort: 9000
        {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      {{- include "headrace.probes" . | nindent 6 }}
      {{- if or $isGateway .withArena }}
      lifecycle:
        preStop:
          exec:
            command:
              - /bin/sh
              - -c
              - |
                # In pods of workers, too: those of a cluster that was replaced end together, and streams need both.
                sleep {{ $values.drain.gatewaySeconds }} &
                {{- if .withArena }}
                timeout {{ $values.drain.storeSeconds }} headrace nodes drain "$HOSTNAME" {{ include "headrace.callOptions" $root }} || true
                {{- end }}
                wait
      {{- end }}
      volumeMounts:
        - name: shared-memory
          mountPath: /dev/shm
        - name: home
          mountPath: /home/headrace
        - name: tmp
          mountPath: /tmp
        {{- if $values.model.claimName }}
        - name: models
          mountPath: {{ $values.model.mountPath }}
          readOnly: true
        {{- end }}
        {{- if and .withArena (gt (float64 $values.settings.disk_gb) 0.0) }}
        - name: blocks
          mountPath: /var/lib/headrace/blocks
        {{- end }}
        {{- if $values.tls.authoritySecret.name }}
        - name: tls
          mountPath: /etc/headrace/tls
          readOnly: true
        {{- end }}
        {{- if $values.tls.callersSecret.name }}
        - name: callers
          mountPath: /etc/headrace/callers
          readOnly: true
        {{- end }}
        {{- if $values.tls.callersAuthoritySecret.name }}
        - name: callers-authority
          mountPath: /etc/headrace/callers-authority
          readOnly: true
        {{- end }}
        {{- if $values.tenants.secretName }}
        - name: tenants
          mountPath: /etc/headrace/tenants
          readOnly: true
        {{- end }}
        {{- if and (include "headrace.redisTls" $root) $values.redis.external.caSecret.name }}
        - name: redis-ca
          mountPath: /etc/headrace/redis-ca
          readOnly: true
        {{- end }}
  volumes:
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ $sharedMb }}Mi
    - name: home
      emptyDir:
        sizeLimit: {{ $values.model.cacheSize }}
    - name: tmp
      emptyDir: {}
    {{- if $values.model.claimName }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ $values.model.claimName }}
        readOnly: true
    {{- end }}
    {{- if and .withArena (gt (float64 $values.settings.disk_gb) 0.0) }}
    {{- $diskMb := mulf (float64 $values.settings.disk_gb) 1126.4 | ceil | int64 }}
    - name: blocks
      {{- if eq $values.diskTier.type "claim" }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            {{- with $values.diskTier.storageClassName }}
            storageClassName: {{ . }}
            {{- end }}
            resources:
              requests:
                storage: {{ $diskMb }}Mi
      {{- else }}
      emptyDir:
        sizeLimit: {{ $diskMb }}Mi
      {{- end }}
    {{- end }}
    {{- if $values.tls.authoritySecret.name }}
    - name: tls
      emptyDir:
        medium: Memory
        sizeLimit: 1Mi
    - name: authority
      secret:
        secretName: {{ $values.tls.authoritySecret.name }}
        defaultMode: 288  # 0440: the group is the pod's
    {{- end }}
    {{- if $values.tls.callersSecret.name }}
    - name: callers
      secret:
        secretName: {{ $values.tls.callersSecret.name }}
        defaultMode: 288
    {{- end }}
    {{- if $values.tls.callersAuthoritySecret.name }}
    - name: callers-authority
      secret:
        secretName: {{ $values.tls.callersAuthoritySecret.name }}
        defaultMode: 288
    {{- end }}
    {{- if $values.tenants.secretName }}
    - name: tenants
      secret:
        secretName: {{ $values.tenants.secretName }}
        items:
          - key: {{ $values.tenants.key }}
            path: tenants.yaml
    {{- end }}
    {{- if and (include "headrace.redisTls" $root) $values.redis.external.caSecret.name }}
    - name: redis-ca
      secret:
        secretName: {{ $values.redis.external.caSecret.name }}
    {{- end }}
{{- end -}}

{{/* Parts of a pod that have metrics: gateways and workers, and one store node. Its port is left free where there is none. */}}
{{- define "headrace.partsInPod" -}}
{{- $values := .root.Values -}}
{{- $settings := $values.settings -}}
{{- $decode := int $values.decodePods.perPod -}}
{{- $prefill := ternary (int $values.prefillPods.perPod) 0 (gt (int $settings.prefill_workers) 0) -}}
{{- if eq .component "gateway" -}}2
{{- else if eq .component "prefill" -}}{{ add 1 $prefill }}
{{- else if eq .component "decode" -}}{{ add 1 $decode }}
{{- else if eq .component "both" -}}{{ add 1 $decode $prefill }}
{{- else if $values.head.runsWork -}}
{{ add 1 (int $settings.gateways) (max (int $settings.decode_workers) (int $settings.decode_workers_max)) (ternary (max (int $settings.prefill_workers) (int $settings.prefill_workers_max)) 0 (gt (int $settings.prefill_workers) 0)) }}
{{- else -}}0
{{- end -}}
{{- end -}}

{{/* Where a pod that is none of Ray's may run, and with what its image is pulled. */}}
{{- define "headrace.smallPod" -}}
# A small pod that any node will do for, as for the head.
{{- with .Values.head.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.head.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "headrace.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Time for the pod to end: its streams and its drain, half a minute that Ray takes to drain its node, and some for the
processes. */}}
{{- define "headrace.graceSeconds" -}}
{{- $drain := .root.Values.drain -}}
{{- $isGateway := eq .component (include "headrace.gatewayComponent" .root) -}}
{{ add 45 (max (ternary (int $drain.storeSeconds) 0 .withArena) (ternary (int $drain.gatewaySeconds) 0 (or .withArena $isGateway))) }}
{{- end -}}

{{/*
Alive: this node's raylet runs. It does not ask Redis, and a head that cannot be reached is no fault of its own.
Ready: the head's control store answers (KubeRay deploys to no head that is not ready, so it cannot wait for gateways);
a gateway's pod could serve a request now; in a worker's pod a worker has loaded its model, since its metrics have the port
after the store node's from then on.
*/}}
{{- define "headrace.probes" -}}
{{- $probes := .root.Values.probes -}}
startupProbe:
  httpGet:
    path: /api/local_raylet_healthz
    port: 52365
  periodSeconds: 5
  timeoutSeconds: {{ $probes.timeoutSeconds }}
  failureThreshold: {{ max 1 (div (int $probes.startupSeconds) 5) }}
livenessProbe:
  httpGet:
    path: /api/local_raylet_healthz
    port: 52365
  {{- include "headrace.probeTimes" $probes | nindent 2 }}
readinessProbe:
  {{- if and (eq .component "gateway") .root.Values.tls.callersAuthoritySecret.name }}
  # The kubelet has no certificate to show.
  exec:
    command:
      - headrace-healthcheck
      - https://127.0.0.1:8000/ready
      - /etc/headrace/callers-authority/tls.crt
      - /etc/headrace/callers-authority/tls.key
  {{- else }}
  httpGet:
    {{- if eq .component "head" }}
    path: /api/gcs_healthz
    port: 8265
    {{- else if eq .component "gateway" }}
    path: /ready
    port: 8000
    {{- if .root.Values.tls.callersSecret.name }}
    scheme: HTTPS
    {{- end }}
    {{- else }}
    path: /metrics
    port: {{ add (include "headrace.metricsPort" .root | int) 1 }}
    {{- if .root.Values.tls.authoritySecret.name }}
    scheme: HTTPS
    {{- end }}
    {{- end }}
  {{- end }}
  {{- include "headrace.probeTimes" $probes | nindent 2 }}
{{- end -}}

{{- define "headrace.probeTimes" -}}
periodSeconds: {{ .periodSeconds }}
timeoutSeconds: {{ .timeoutSeconds }}
failureThreshold: {{ .failureThreshold }}
{{- end -}}
