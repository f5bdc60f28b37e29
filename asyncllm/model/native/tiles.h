/* The tile registers of a processor's matrix unit (AMX); without one, ASYNCLLM_TILES is not defined. */
#ifndef ASYNCLLM_TILES_H
#define ASYNCLLM_TILES_H
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define ASYNCLLM_TILES
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TILE 16  /* rows of a tile, and floats of one */
#define DEPTH 32 /* bfloat16 numbers of a tile's row: what is summed over */

/* How tiles are laid out: the processor's own format. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) Tiles;

/* The system keeps tile registers only for those who ask. */
static inline int may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }
#endif
#endif
