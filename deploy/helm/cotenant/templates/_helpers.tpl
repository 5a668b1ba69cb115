{{- define "cotenant.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "cotenant.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "cotenant.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "cotenant.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "cotenant.selector" -}}
app.kubernetes.io/name: {{ include "cotenant.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "cotenant.labels" -}}
{{ include "cotenant.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "cotenant.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "cotenant.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "cotenant.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}
{{- end }}

{{- /* One TOML value. Numbers come as floats; the agent wants whole ones whole. */ -}}
{{- define "cotenant.toml.value" -}}
{{- if kindIs "string" . -}}{{ toJson . }}
{{- else if kindIs "bool" . -}}{{ . }}
{{- else if kindIs "slice" . -}}
[{{ range $index, $item := . }}{{ if $index }}, {{ end }}{{ include "cotenant.toml.value" $item }}{{ end }}]
{{- else if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha }}{{ if $index }},{{ end }} {{ toJson $key }} = {{ include "cotenant.toml.value" (get $ $key) }}{{ end }} }
{{- else if eq (float64 .) (floor (float64 .)) -}}{{ int64 . }}
{{- else -}}{{ . }}
{{- end -}}
{{- end }}

{{- /* The agent's configuration: what the chart knows of the pod, then the user's values over it. */ -}}
{{- define "cotenant.toml" -}}
{{- $known := dict "server" (dict "listen" (printf "%s:%d" .Values.server.address (int .Values.server.port))) -}}
{{- if .Values.server.webConfig.secret -}}
{{- $_ := set $known.server "web_config" "/etc/cotenant-web/web.yml" -}}
{{- end -}}
{{- $nvml := dict -}}
{{- if .Values.gpu.libraryPath -}}
{{- $_ := set $nvml "library" "/driver/libnvidia-ml.so.1" -}}
{{- end -}}
{{- if .Values.gpu.releaseAnnotation -}}
{{- $_ := set $nvml "release_file" "/etc/podinfo/release" -}}
{{- end -}}
{{- if $nvml -}}
{{- $_ := set $known "nvml" $nvml -}}
{{- end -}}
{{- if .Values.otlp.endpoint -}}
{{- $_ := set $known "otlp" (dict "enabled" true "endpoint" .Values.otlp.endpoint "protocol" .Values.otlp.protocol) -}}
{{- end -}}
{{- if .Values.apiWatch.enabled -}}
{{- $_ := set $known "kubernetes" (dict "api_watch" true) -}}
{{- end -}}
{{- if .Values.host.slurmJobMapping -}}
{{- $_ := set $known "slurm" (dict "job_mapping" .Values.host.slurmJobMapping) -}}
{{- end -}}
{{- $all := mustMergeOverwrite $known (deepCopy .Values.config) -}}
{{- range $section := keys $all | sortAlpha }}
[{{ $section }}]
{{- $values := get $all $section }}
{{- range $key := keys $values | sortAlpha }}
{{ $key }} = {{ include "cotenant.toml.value" (get $values $key) }}
{{- end }}
{{ end }}
{{- end }}

{{- /* The ports of everybody that the configuration sends to, as a JSON list. */ -}}
{{- define "cotenant.receiverPorts" -}}
{{- $urls := dig "alertmanager" "urls" (list) .Values.config -}}
{{- range list .Values.otlp.endpoint (dig "otlp" "endpoint" "" .Values.config) -}}
{{- if . -}}{{- $urls = append $urls . -}}{{- end -}}
{{- end -}}
{{- $ports := list -}}
{{- range $urls -}}
{{- $url := urlParse . -}}
{{- $named := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- $ports = append $ports (int (default (eq $url.scheme "https" | ternary "443" "80") $named)) -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end }}

{{- /* How kubelet asks for a page: by HTTP, by HTTPS, or, where every client needs a certificate, through the agent's socket. */ -}}
{{- define "cotenant.probe" -}}
{{- $web := .root.Values.server.webConfig -}}
{{- if and $web.secret $web.clientCertificates -}}
exec: { command: [/usr/bin/cotenant, health{{ if eq .path "/readyz" }}, --ready{{ end }}, --config, /etc/cotenant/cotenant.toml] }
{{- else -}}
httpGet: { path: {{ .path }}, port: metrics{{ if and $web.secret $web.tls }}, scheme: HTTPS{{ end }} }
{{- end -}}
{{- end }}
