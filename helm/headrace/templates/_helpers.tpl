{{- define "headrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What pods are selected by: it must never change. */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "headrace.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "headrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "headrace.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* "true" where Ray's autoscaler is needed: some number of workers follows the load, in pods that come and go. */}}
{{- define "headrace.autoscaling" -}}
{{- $s := .Values.settings -}}
{{- if and (not .Values.head.runsWork) (or (gt (int $s.prefill_workers_max) (int $s.prefill_workers)) (gt (int $s.decode_workers_max) (int $s.decode_workers))) -}}
true
{{- end -}}
{{- end -}}

{{/* The pods that gateways run in: a component's name. */}}
{{- define "headrace.gatewayComponent" -}}
{{ ternary "head" "gateway" .Values.head.runsWork }}
{{- end -}}

{{/* Pods of a kind that are there always; with `most`, those that there may be. Call with dict root, component, most. */}}
{{- define "headrace.podCount" -}}
{{- $values := .root.Values -}}
{{- $settings := $values.settings -}}
{{- $prefill := int $settings.prefill_workers -}}
{{- $decode := int $settings.decode_workers -}}
{{- if .most -}}
{{- $prefill = max $prefill (int $settings.prefill_workers_max) -}}
{{- $decode = max $decode (int $settings.decode_workers_max) -}}
{{- end -}}
{{- $prefillPods := divf (float64 $prefill) $values.prefillPods.perPod | ceil | int -}}
{{- $decodePods := divf (float64 $decode) $values.decodePods.perPod | ceil | int -}}
{{- if eq .component "gateway" -}}{{ int $settings.gateways }}
{{- else if eq .component "prefill" -}}{{ $prefillPods }}
{{- else if and $values.workersTogether (gt (int $settings.prefill_workers) 0) -}}{{ max $prefillPods $decodePods }}
{{- else -}}{{ $decodePods }}
{{- end -}}
{{- end -}}

{{/* The memory limit in a container's `resources`; "" where there is none. Call with the values that have them. */}}
{{- define "headrace.memoryLimit" -}}
{{ ((.resources | default dict).limits | default dict).memory | default "" }}
{{- end -}}

{{/* MiB of a quantity in Mi, Gi or Ti; 0 for one in other units, which is then not compared. */}}
{{- define "headrace.mebibytes" -}}
{{- $text := toString . -}}
{{- if hasSuffix "Ti" $text -}}{{ mulf (trimSuffix "Ti" $text | float64) 1048576 | int64 }}
{{- else if hasSuffix "Gi" $text -}}{{ mulf (trimSuffix "Gi" $text | float64) 1024 | int64 }}
{{- else if hasSuffix "Mi" $text -}}{{ trimSuffix "Mi" $text | float64 | int64 }}
{{- else -}}0
{{- end -}}
{{- end -}}

{{- define "headrace.redisHost" -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{ include "headrace.fullname" . }}-redis
{{- else -}}
{{ required "redis.external.host is needed with redis.mode external" .Values.redis.external.host }}
{{- end -}}
{{- end -}}

{{- define "headrace.redisPort" -}}
{{ ternary 6379 (int .Values.redis.external.port) (eq .Values.redis.mode "bundled") }}
{{- end -}}

{{- define "headrace.redisTls" -}}
{{- if and (eq .Values.redis.mode "external") .Values.redis.external.tls -}}true{{- end -}}
{{- end -}}

{{/* The ACL user in the URL: its name, or the variable that Kubernetes puts it into. */}}
{{- define "headrace.redisUser" -}}
{{ if .Values.redis.external.usernameSecret.name }}$(HEADRACE_REDIS_USERNAME){{ else }}{{ .Values.redis.external.username | default "" }}{{ end }}
{{- end -}}

{{/* The URL without the password, which Kubernetes puts in from the environment when a container starts. */}}
{{- define "headrace.redisUrl" -}}
{{- $redis := .Values.redis -}}
{{- $scheme := ternary "rediss" "redis" (eq (include "headrace.redisTls" .) "true") -}}
{{- $user := ternary (include "headrace.redisUser" .) "" (eq $redis.mode "external") -}}
{{- $who := "" -}}
{{- if $redis.passwordSecret.name -}}
{{- $who = printf "%s:$(HEADRACE_REDIS_PASSWORD)@" $user -}}
{{- end -}}
{{- $options := list -}}
{{- if and (include "headrace.redisTls" .) $redis.external.caSecret.name -}}
{{- $options = append $options (printf "ssl_ca_certs=/etc/headrace/redis-ca/%s" $redis.external.caSecret.key) -}}
{{- end -}}
{{- $primary := "" -}}
{{- if and (eq $redis.mode "external") $redis.external.sentinel.primary -}}
{{- $scheme = printf "%s+sentinel" $scheme -}}
{{- $primary = printf "%s/" $redis.external.sentinel.primary -}}
{{- if and $redis.passwordSecret.name $redis.external.sentinel.withPassword -}}
{{- $options = append $options "sentinel_password=$(HEADRACE_REDIS_PASSWORD)" -}}
{{- if $user -}}
{{- $options = append $options (printf "sentinel_username=%s" $user) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $redis.mode "external") $redis.external.cluster -}}
{{- $scheme = printf "%s+cluster" $scheme -}}
{{- end -}}
{{- $query := ternary (printf "?%s" (join "&" $options)) "" (gt (len $options) 0) -}}
{{- printf "%s://%s%s:%s/%s%d%s" $scheme $who (include "headrace.redisHost" .) (include "headrace.redisPort" .) $primary (int $redis.database) $query -}}
{{- end -}}

{{/* First port of metrics: a store node's. The parts beside it have the next ones. */}}
{{- define "headrace.metricsPort" -}}9400{{- end -}}

{{/* "true" where something listens for others without TLS between pods or without keys, so that only the network policies
keep strangers out. KV events know no TLS. */}}
{{- define "headrace.insecure" -}}
{{- $events := or (get .Values.settings "kv_events_endpoint") (get .Values.settings "kv_events_replay_endpoint") -}}
{{- if or (not .Values.tls.authoritySecret.name) (not .Values.tenants.secretName) $events -}}true{{- end -}}
{{- end -}}

{{/* The name by which pods call the gateways' Service; its certificate has it. */}}
{{- define "headrace.gatewayHost" -}}
{{ include "headrace.fullname" . }}-gateway{{ if .Values.tls.callersSecret.name }}.{{ .Release.Namespace }}.svc{{ end }}
{{- end -}}

{{/* Options by which `headrace` commands in pods call the gateways. */}}
{{- define "headrace.callOptions" -}}
{{- $tls := .Values.tls -}}
--address {{ include "headrace.gatewayHost" . }}:9000
{{- if $tls.callersSecret.name }} --tls-ca-file /etc/headrace/callers/{{ $tls.callersSecret.authority }}{{ end }}
{{- if $tls.callersAuthoritySecret.name }} --tls-cert-file /etc/headrace/callers-authority/tls.crt --tls-key-file /etc/headrace/callers-authority/tls.key{{ end }}
{{- end -}}

{{/* Port of the collector of traces. */}}
{{- define "headrace.collectorPort" -}}
{{- $host := regexReplaceAll "^https?://([^/]*).*$" (get .Values.settings "otlp_endpoint") "${1}" -}}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" $host) | default "4317" -}}
{{- end -}}

{{/* Refuses values that cannot work together, with what to change. */}}
{{- define "headrace.check" -}}
{{- $s := .Values.settings -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "headrace.fullname" .)) -}}
{{- fail (printf "fullnameOverride is needed: %s is no name for a Service and a RayService, which begins with a letter and has no dots" (include "headrace.fullname" .)) -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "bundled") (not .Values.redis.passwordSecret.name) -}}
{{- fail "redis.passwordSecret.name is needed with the bundled Redis: it is never open" -}}
{{- end -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- $redisMemory := include "headrace.memoryLimit" .Values.redis.bundled -}}
{{- $redisLimit := include "headrace.mebibytes" $redisMemory | int64 -}}
{{- if and (gt $redisLimit 0) (le $redisLimit (int64 .Values.redis.bundled.maxMemoryMb)) -}}
{{- fail (printf "redis.bundled.maxMemoryMb is %d, and its container is ended at resources.limits.memory, %s" (int64 .Values.redis.bundled.maxMemoryMb) $redisMemory) -}}
{{- end -}}
{{- end -}}
{{- if and (or .Values.redis.external.username .Values.redis.external.usernameSecret.name) (not .Values.redis.passwordSecret.name) -}}
{{- fail "redis.passwordSecret.name is needed with redis.external.username and usernameSecret" -}}
{{- end -}}
{{- if and .Values.redis.external.username .Values.redis.external.usernameSecret.name -}}
{{- fail "redis.external.username and usernameSecret.name name two users; leave one empty" -}}
{{- end -}}
{{- $sentinel := .Values.redis.external.sentinel -}}
{{- if and (eq .Values.redis.mode "external") $sentinel.primary .Values.redis.passwordSecret.name .Values.ray.gcsFaultTolerance (not $sentinel.withPassword) -}}
{{- fail "redis.external.sentinel.withPassword must be true with ray.gcsFaultTolerance: Ray sends the password to Sentinels, which refuse it where they want none" -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "external") .Values.redis.external.cluster -}}
{{- if $sentinel.primary -}}
{{- fail "redis.external.cluster and redis.external.sentinel.primary name two kinds of Redis; leave one out" -}}
{{- end -}}
{{- if .Values.ray.gcsFaultTolerance -}}
{{- fail "ray.gcsFaultTolerance must be false with redis.external.cluster: Ray keeps its state in no Redis Cluster of several shards" -}}
{{- end -}}
{{- if ne (int .Values.redis.database) 0 -}}
{{- fail "redis.database must be 0 with redis.external.cluster: a Redis Cluster has no other" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.tenants.secretName (ne (toString $s.hash_algorithm) "sha256") -}}
{{- fail "settings.hash_algorithm must be sha256 with tenants.secretName: tenants might construct collisions" -}}
{{- end -}}
{{- if and .Values.tenants.secretName (not .Values.tenants.adminKeySecret.name) -}}
{{- fail "tenants.adminKeySecret.name is needed with tenants.secretName: pods drain their store nodes by it" -}}
{{- end -}}
{{- if and .Values.monitoring.prometheusRule.enabled (not .Values.monitoring.serviceMonitor.enabled) -}}
{{- fail "monitoring.serviceMonitor.enabled is needed with monitoring.prometheusRule.enabled: rules ask for what it scrapes, under its labels, and one of them fires where there is nothing" -}}
{{- end -}}
{{- if and .Values.tls.callersAuthoritySecret.name (not .Values.tls.callersSecret.name) -}}
{{- fail "tls.callersSecret.name is needed with tls.callersAuthoritySecret: who asks for certificates shows one" -}}
{{- end -}}
{{- $monitored := or .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled -}}
{{- if and $monitored .Values.networkPolicies.enabled (not .Values.networkPolicies.prometheus) -}}
{{- fail "networkPolicies.prometheus is needed with monitoring.serviceMonitor and monitoring.podMonitor: the policies let nobody else read metrics" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs is needed with httpRoute.enabled" -}}
{{- end -}}
{{- if and .Values.grpcRoute.enabled (not .Values.grpcRoute.parentRefs) -}}
{{- fail "grpcRoute.parentRefs is needed with grpcRoute.enabled" -}}
{{- end -}}
{{- if and (include "headrace.insecure" .) (not .Values.networkPolicies.enabled) -}}
{{- fail "without networkPolicies.enabled anybody in the cluster reaches the pods: set tls.authoritySecret.name (TLS between pods) and tenants.secretName (keys), and no kv_events_endpoint, or leave the policies on" -}}
{{- end -}}
{{- $public := or .Values.ingress.enabled .Values.httpRoute.enabled .Values.grpcRoute.enabled (ne .Values.service.type "ClusterIP") -}}
{{- if and $public (not .Values.tenants.secretName) -}}
{{- fail "tenants.secretName is needed with ingress, httpRoute, grpcRoute or a service.type that is reached from outside: without keys whoever comes in may use and empty the cache" -}}
{{- end -}}
{{- end -}}
