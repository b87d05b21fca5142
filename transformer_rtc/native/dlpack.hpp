// SPDX-License-Identifier: Apache-2.0
// The part of the DLPack binary interface (version 1) that this module speaks. https://dmlc.github.io/dlpack/latest/
#pragma once

#include <cstdint>

extern "C" {

struct DLDevice {
  int32_t type;
  int32_t id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major without gaps
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* manager;
  void (*deleter)(DLManagedTensor*);
};

struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};

struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;  // 1: read-only
  DLTensor tensor;
};

struct DLPackExchangeAPI {
  DLPackVersion version;
  void* previous;
  int (*allocate)(DLTensor* prototype, DLManagedTensorVersioned** out, void* error,
                  void (*set_error)(void* error, const char* kind, const char* message));
  int (*managed_from_object)(void* object, DLManagedTensorVersioned** out);
  int (*object_from_managed)(DLManagedTensorVersioned* tensor, void** out);
  int (*tensor_from_object)(void* object, DLTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};
}

constexpr int32_t kDLCUDA = 2;
