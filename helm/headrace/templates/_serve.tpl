{{/* GPUs of one worker: a share of its pod's, such that all find a place; what one worker has lies on one GPU where they
share some. Call with dict gpus, workers. */}}
{{- define "headrace.gpusPerWorker" -}}
{{- $gpus := int .gpus -}}
{{- $workers := int .workers -}}
{{- if or (eq $gpus 0) (ge $gpus $workers) -}}{{ div $gpus $workers }}
{{- else -}}{{ divf (floor (divf 10000 (ceil (divf $workers $gpus)))) 10000 }}
{{- end -}}
{{- end -}}

{{/* Serve's config: the settings, and for each deployment the Ray resource that puts it into pods of its kind. */}}
{{- define "headrace.serveConfig" -}}
{{- $values := .Values -}}
{{- $settings := deepCopy $values.settings -}}
{{- $settings = merge (dict "store_host" "auto" "arena_dir" "/dev/shm") $settings -}}
{{- if gt (float64 $settings.disk_gb) 0.0 -}}
{{- $settings = set $settings "disk_dir" "/var/lib/headrace/blocks" -}}
{{- end -}}
{{- if $values.tenants.secretName -}}
{{- $settings = set $settings "tenants_file" "/etc/headrace/tenants/tenants.yaml" -}}
{{- end -}}
{{- $settings = set $settings "metrics_port" (include "headrace.metricsPort" . | int) -}}
{{- if $values.tls.authoritySecret.name -}}
{{- $settings = merge (dict "tls_cert_file" "/etc/headrace/tls/parts/cert.pem" "tls_key_file" "/etc/headrace/tls/parts/key.pem" "tls_ca_file" "/etc/headrace/tls/parts/ca.pem") $settings -}}
{{- end -}}
{{- if include "headrace.insecure" . -}}
{{- $settings = set $settings "insecure_network" true -}}
{{- end -}}
{{- /* A number that stays is Serve's to know and no argument, so that a change of it replaces no worker. */ -}}
{{- $replicas := dict -}}
{{- range $kind := list "gateways" "prefill_workers" "decode_workers" -}}
{{- $number := get $settings $kind | int -}}
{{- $most := printf "%s_max" $kind -}}
{{- if le (get $settings $most | int) $number -}}
{{- $replicas = set $replicas $kind $number -}}
{{- $settings = set $settings $kind (min 1 $number) -}}
{{- $settings = omit $settings $most -}}
{{- end -}}
{{- end -}}
{{- $prefill := gt (int $settings.prefill_workers) 0 -}}
{{- $together := and $values.workersTogether $prefill -}}
{{- $sharers := ternary (add (int $values.decodePods.perPod) (int $values.prefillPods.perPod)) (int $values.decodePods.perPod) $together -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  {{- if $values.tls.callersSecret.name }}
  ssl_certfile: /etc/headrace/callers/tls.crt
  ssl_keyfile: /etc/headrace/callers/tls.key
  {{- with $values.tls.callersAuthoritySecret }}
  {{- if .name }}
  ssl_ca_certs: /etc/headrace/callers-authority/{{ .authority }}
  {{- end }}
  {{- end }}
  {{- end }}
grpc_options:
  port: 9000
  grpc_servicer_functions:
    - headrace_cluster.proxy_services.add_inference
    - headrace_cluster.proxy_services.add_cache_admin
    - headrace_cluster.proxy_services.add_health
applications:
  - name: headrace
    route_prefix: /
    import_path: headrace_cluster.serve_app:serve_app
    logging_config: {enable_access_log: false}  # metrics count requests, and traces follow them
    args:
      {{- range $name, $value := $settings }}
      {{ $name }}: {{ if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}{{ else }}{{ toJson $value }}{{ end }}
      {{- end }}
    deployments:
      - name: Gateway
        {{- with get $replicas "gateways" }}
        num_replicas: {{ . }}
        {{- end }}
        graceful_shutdown_timeout_s: {{ int $values.drain.replicaSeconds }}
        ray_actor_options:
          num_cpus: 0.1
          resources:
            headrace_gateway: 1
      {{- if $prefill }}
      - name: PrefillWorker
        {{- with get $replicas "prefill_workers" }}
        num_replicas: {{ . }}
        {{- end }}
        graceful_shutdown_timeout_s: {{ int $values.drain.replicaSeconds }}
        ray_actor_options:
          num_cpus: 0.1
          num_gpus: {{ include "headrace.gpusPerWorker" (dict "gpus" (ternary $values.decodePods.gpusPerPod $values.prefillPods.gpusPerPod $together) "workers" (ternary $sharers $values.prefillPods.perPod $together)) }}
          resources:
            headrace_prefill: 1
      {{- end }}
      - name: DecodeWorker
        {{- with get $replicas "decode_workers" }}
        num_replicas: {{ . }}
        {{- end }}
        graceful_shutdown_timeout_s: {{ int $values.drain.replicaSeconds }}
        ray_actor_options:
          num_cpus: 0.1
          num_gpus: {{ include "headrace.gpusPerWorker" (dict "gpus" $values.decodePods.gpusPerPod "workers" $sharers) }}
          resources:
            headrace_decode: 1
{{- end -}}
