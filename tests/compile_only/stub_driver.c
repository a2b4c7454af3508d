// Stands for the CUDA driver where there is no GPU: every call succeeds, and launches are written down.
#include "cuda.h"
#include <stdint.h>
#include <string.h>

#define MAX_LAUNCHES 64
#define MAX_PARAMS 96
#define WORDS 16

static int modules = 0, launches = 0;
static int sizes[256][MAX_PARAMS], counts[256];
static int launched_function[MAX_LAUNCHES];
static unsigned launched_grid[MAX_LAUNCHES], launched_threads[MAX_LAUNCHES], launched_shared[MAX_LAUNCHES];
static uint64_t params[MAX_LAUNCHES][MAX_PARAMS][WORDS];

// What the test asks.
void stub_describe(int function, int count, const int *bytes) {
  counts[function] = count;
  memcpy(sizes[function], bytes, count * sizeof(int));
}
void stub_clear(void) { launches = 0; }
int stub_launches(void) { return launches; }
int stub_function(int launch) { return launched_function[launch]; }
unsigned stub_grid(int launch) { return launched_grid[launch]; }
unsigned stub_threads(int launch) { return launched_threads[launch]; }
unsigned stub_shared(int launch) { return launched_shared[launch]; }
uint64_t stub_word(int launch, int param, int word) { return params[launch][param][word]; }

// What Triton calls.
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "stub"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132
           : attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE          ? 32
                                                                  : 232448;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)(uintptr_t)++modules;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}
// The fields that matter, one a word; word 0 is the address.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  uint64_t *words = (uint64_t *)map;
  memset(map, 0, sizeof *map);
  words[0] = (uint64_t)address;
  words[1] = type;
  words[2] = rank;
  for (unsigned i = 0; i < rank && i < 3; i++) {
    words[3 + i] = dims[i];
    words[6 + i] = box[i];
    if (i + 1 < rank) words[9 + i] = strides[i];
  }
  words[12] = swizzle;
  words[13] = promotion;
  words[14] = fill;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **kernel_params, void **extra) {
  int f = (int)(uintptr_t)function;
  if (launches < MAX_LAUNCHES) {
    launched_function[launches] = f;
    launched_grid[launches] = config->gridDimX * config->gridDimY * config->gridDimZ;
    launched_threads[launches] = config->blockDimX;
    launched_shared[launches] = config->sharedMemBytes;
    for (int i = 0; i < counts[f]; i++) {
      memset(params[launches][i], 0, sizeof params[launches][i]);
      memcpy(params[launches][i], kernel_params[i], sizes[f][i]);
    }
    launches++;
  }
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **kernel_params, void **extra) {
  CUlaunchConfig config = {.gridDimX = gx, .gridDimY = gy, .gridDimZ = gz, .blockDimX = bx, .sharedMemBytes = shared};
  return cuLaunchKernelEx(&config, f, kernel_params, extra);
}
