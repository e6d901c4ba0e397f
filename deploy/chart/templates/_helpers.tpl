{{- define "pagewire.labels" -}}
app: {{ .Release.Name }}
{{- end }}

{{- define "pagewire.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "pagewire.claim" -}}
{{ .Values.models.existingClaim | default (printf "%s-models" .Release.Name) }}
{{- end }}

{{/* What every pod's spec has, without its containers. */}}
{{- define "pagewire.pod" -}}
# Must exceed preStop + --drain-timeout + 5 s; otherwise Kubernetes kills the pod while requests are open.
terminationGracePeriodSeconds: {{ add .Values.preStop .Values.drainTimeout 15 }}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: models
    persistentVolumeClaim: {claimName: {{ include "pagewire.claim" . }}}
  - name: cache
    emptyDir: {}
  - name: run
    emptyDir: {medium: Memory, sizeLimit: 16Mi}
  - name: tmp
    emptyDir: {}
  {{- if include "pagewire.hasRanks" . }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: 1Gi}
  {{- end }}
{{- end }}

{{/* What every container has, without its command, ports and probes. */}}
{{- define "pagewire.container" -}}
image: {{ include "pagewire.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources: {{ toYaml .Values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: cache, mountPath: /cache}
  - {name: run, mountPath: /run/pagewire}
  - {name: tmp, mountPath: /tmp}
  {{- if include "pagewire.hasRanks" . }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
{{- end }}

{{/* Whether a pod has several GPUs: NCCL may need more shared memory than the 64 MB that containers have. */}}
{{- define "pagewire.hasRanks" -}}
{{- if gt (int (dig "limits" "nvidia.com/gpu" 0 .Values.resources)) 1 }}true{{ end }}
{{- end }}

{{- define "pagewire.apiKey" -}}
{{- with .Values.apiKeySecret }}
{{- if .name }}
- name: PAGEWIRE_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "pagewire.serve" -}}
- serve
- {{ .Values.model | quote }}
- --host=0.0.0.0
- --drain-timeout={{ .Values.drainTimeout }}
- --timeout-keep-alive=75
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Of the container that serves HTTP. */}}
{{- define "pagewire.http" -}}
ports:
  - {name: http, containerPort: 8000}
# The first start may download the model; the server listens after loading it.
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 240
# Removes the pod from the Service at once when the queue is full, a process is being replaced, or it drains.
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 1
# pagewire replaces dead and hung processes itself, and a new worker must load the model. This probe is for failures that
# pagewire cannot repair, so it waits longer than a load takes.
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 60
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ .Values.preStop | quote }}] # until all nodes have removed this endpoint; requests are still served
{{- end }}
