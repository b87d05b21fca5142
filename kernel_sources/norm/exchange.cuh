// SPDX-License-Identifier: Apache-2.0
// How the CTAs that share a row exchange VALUES floats each, through BUFFERS buffers in turn. Without CLUSTER and GRID,
// send() and receive() do nothing.
#pragma once

#include "norm/partition.cuh"

namespace trtc {

static_assert(CTAS_PER_ROW == 1 || (ROWS_PER_CTA == 1 && THREADS_PER_ROW > 32),
              "buffers rely on the barrier of reduce_row()");

struct RowExchange {
  int rank;          // of this CTA among those of its rows
  uint32 sent;       // sends so far
  uint32 received;   // receives so far
  float* buffers;    // [BUFFERS][VALUES][CTAS_PER_ROW]
  uint64* barriers;  // of a cluster, for each buffer
  uint32* arrived;   // of a grid, for each buffer
};

TRTC_DEVICE RowExchange begin_exchange(const Params& params, int rank) {
  RowExchange exchange = {rank, 0, 0, nullptr, nullptr, nullptr};
#if GRID
  exchange.arrived = static_cast<uint32*>(params.workspace) +
                     cta_index() / CTAS_PER_ROW * grid_workspace_words(CTAS_PER_ROW, BUFFERS, VALUES);
  exchange.buffers = reinterpret_cast<float*>(exchange.arrived + BUFFERS);
#elif CLUSTER
  TRTC_SHARED(float, buffers, BUFFERS * VALUES * CTAS_PER_ROW);
  TRTC_SHARED(uint64, barriers, BUFFERS);
  exchange.buffers = buffers;
  exchange.barriers = barriers;
  begin_cluster_exchange<CTAS_PER_ROW, BUFFERS, VALUES>(barriers);
#endif
  return exchange;
}

TRTC_DEVICE void send(RowExchange& exchange, const float (&values)[VALUES]) {
#if GRID || CLUSTER
  const int buffer_index = static_cast<int>(exchange.sent % BUFFERS);
  float* const buffer = exchange.buffers + buffer_index * VALUES * CTAS_PER_ROW;
#if GRID
  send_to_grid<CTAS_PER_ROW>(values, buffer, exchange.arrived + buffer_index, exchange.rank);
#else
  if (exchange.sent == 0) cluster_wait();  // here, behind the loads of the row
  send_to_cluster<CTAS_PER_ROW>(values, buffer, exchange.barriers + buffer_index, exchange.rank);
#endif
  ++exchange.sent;
#endif
}

// Thread i gets the values of CTA i % CTAS_PER_ROW. Where there is only one, they stay what they are.
TRTC_DEVICE void receive(RowExchange& exchange, float (&values)[VALUES]) {
#if GRID || CLUSTER
  const int buffer_index = static_cast<int>(exchange.received % BUFFERS);
  const uint32 times = exchange.received / BUFFERS;
  const float* const buffer = exchange.buffers + buffer_index * VALUES * CTAS_PER_ROW;
#if GRID
  receive_from_grid<CTAS_PER_ROW>(values, buffer, exchange.arrived + buffer_index, times);
#else
  receive_from_cluster<CTAS_PER_ROW, PERSISTENT>(values, buffer, exchange.barriers + buffer_index, times % 2);
#endif
  ++exchange.received;
#endif
}

}  // namespace trtc
