/* CUDA without a GPU: the functions that have to return something. build.py writes all others, which return 0.

Memory of the device is memory of the host, and copies are made. A kernel does nothing: so where nodes are placed, which
kernels are chosen and what is allocated is real, and numbers are not. What happens is written to $CUDA_STANDIN_LOG. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver_types.h"

typedef int status;
struct dimensions {
  unsigned x, y, z;
};

static void say(const char *format, ...) {
  static FILE *log;
  const char *path = getenv("CUDA_STANDIN_LOG");
  if (!log && !(path && (log = fopen(path, "a")))) return;
  va_list values;
  va_start(values, format);
  vfprintf(log, format, values);
  va_end(values);
  fflush(log);
}

/* One device: an H100 as it describes itself. */
status cudaGetDevice(int *device) { return *device = 0; }
status cudaGetDeviceCount(int *count) { return *count = 1, 0; }
status cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "stand-in");
  properties->major = 9;
  properties->totalGlobalMem = (size_t)80 << 30;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->multiProcessorCount = 132;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  return 0;
}
status cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
           : attribute == cudaDevAttrMultiProcessorCount    ? 132
                                                            : 1024;
  return 0;
}
status cudaMemGetInfo(size_t *left, size_t *total) { return *left = (size_t)70 << 30, *total = (size_t)80 << 30, 0; }
status cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }
status cudaDriverGetVersion(int *version) { return *version = 13000, 0; }
size_t cudnnGetVersion(void) { return 91800; }

/* Memory. */
static status allocate(void **pointer, size_t bytes) { return *pointer = calloc(1, bytes ? bytes : 1), 0; }
status cudaMalloc(void **pointer, size_t bytes) { return say("malloc %zu\n", bytes), allocate(pointer, bytes); }
status cudaMallocFromPoolAsync(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }
status cudaMallocHost(void **pointer, size_t bytes) { return allocate(pointer, bytes); }
status cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) { return allocate(pointer, bytes); }
status cudaFree(void *pointer) { return free(pointer), 0; }
status cudaFreeHost(void *pointer) { return free(pointer), 0; }
status cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
  return say("copy %d %zu\n", kind, bytes), memcpy(to, from, bytes), 0;
}
status cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind) { return cudaMemcpy(to, from, bytes, kind); }
status cudaMemset(void *pointer, int value, size_t bytes) { return memset(pointer, value, bytes), 0; }
status cudaMemsetAsync(void *pointer, int value, size_t bytes) { return cudaMemset(pointer, value, bytes); }
status cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  return memset(attributes, 0, sizeof *attributes), 0;
}

/* Things that are only made and passed on. */
#define MAKE(name) \
  status name(void **thing) { return allocate(thing, 64); }
MAKE(cudaStreamCreate)
MAKE(cudaStreamCreateWithFlags)
MAKE(cudaEventCreate)
MAKE(cudaEventCreateWithFlags)
MAKE(cudaLibraryLoadData)
MAKE(cudaMemPoolCreate)
MAKE(cudaGraphInstantiate)
MAKE(cublasCreate_v2)
MAKE(cublasLtCreate)
MAKE(cublasLtMatmulDescCreate)
MAKE(cublasLtMatmulPreferenceCreate)
MAKE(cublasLtMatrixLayoutCreate)
MAKE(cublasLtMatrixTransformDescCreate)
MAKE(cudnnCreate)
MAKE(cudnnCreateActivationDescriptor)
MAKE(cudnnCreateConvolutionDescriptor)
MAKE(cudnnCreateDropoutDescriptor)
MAKE(cudnnCreateFilterDescriptor)
MAKE(cudnnCreateLRNDescriptor)
MAKE(cudnnCreateReduceTensorDescriptor)
MAKE(cudnnCreateRNNDataDescriptor)
MAKE(cudnnCreateRNNDescriptor)
MAKE(cudnnCreateTensorDescriptor)
status cudaStreamEndCapture(void *stream, void **graph) { return allocate(graph, 64); }
status cudaStreamIsCapturing(void *stream, int *status) { return *status = 0; }
status cudaEventElapsedTime(float *milliseconds) { return *milliseconds = 1, 0; }
status cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, size_t flags, int *found) {
  return *function = 0, found ? *found = 1 : 0, 0;
}
status cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
status cublasSetMathMode(void *handle, int mode) { return say("math %d\n", mode), 0; }
const char *cudaGetErrorString(int error) { return "an error of the stand-in"; }
const char *cudaGetErrorName(int error) { return "standin"; }
const char *cudnnGetErrorString(int error) { return "an error of the stand-in"; }
void cudnnGetLastErrorString(char *text, size_t size) {
  if (size) *text = 0;
}
status cudnnGetReductionIndicesSize(void *handle, void *reduction, void *a, void *b, size_t *bytes) {
  return *bytes = 256, 0;
}
status cudnnGetReductionWorkspaceSize(void *handle, void *reduction, void *a, void *b, size_t *bytes) {
  return *bytes = 256, 0;
}

/* Waits of the host for the device. */
status cudaStreamSynchronize(void *stream) { return say("wait\n"), 0; }
status cudaDeviceSynchronize(void) { return say("wait\n"), 0; }
status cudaEventSynchronize(void *event) { return say("wait\n"), 0; }

/* Kernels: registered by name when a library is loaded, and looked up when they are launched. */
static struct kernel {
  const void *function;
  const char *name;
} *kernels;
static size_t count, room;

void *__cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }
status __cudaRegisterFunction(void **handle, const void *function, char *device, const char *name) {
  if (count == room) kernels = realloc(kernels, (room = room ? 2 * room : 4096) * sizeof *kernels);
  kernels[count++] = (struct kernel){function, name};
  return 0;
}
status __cudaGetKernel(void **kernel, void *function) { return *kernel = function, 0; }
status cudaLibraryGetKernel(void **kernel) { return allocate(kernel, 64); }
static status launch(const void *function) {
  for (size_t i = 0; i < count; i++)
    if (kernels[i].function == function) return say("launch %s\n", kernels[i].name), 0;
  return say("launch ?\n"), 0;
}
status cudaLaunchKernel(const void *function) { return launch(function); }
status __cudaLaunchKernel(const void *function) { return launch(function); }
status cudaLaunchCooperativeKernel(const void *function) { return launch(function); }
status cudaLaunchKernelExC(const void *configuration, const void *function) { return launch(function); }
status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { return *blocks = 1, 0; }
status cudaFuncGetAttributes(struct cudaFuncAttributes *attributes) {
  return memset(attributes, 0, sizeof *attributes), 0;
}
