/* bfloat16 and e^x, for every file of kernels. */
#ifndef ASYNCLLM_COMMON_H
#define ASYNCLLM_COMMON_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

#define SERIAL_ELEMENTS 32768 /* below this, waking a thread costs more than it saves */

static inline float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Round to nearest, ties to even. What is not a number stays that: its lower half is zero, as the inputs' is. */
static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* e^x for x <= 0, within 2 units in the last place; vectorizes, which the library's does not. */
static inline float exp_of_negative(float x) {
    x = x < -87.0f ? -87.0f : x; /* 1.6e-38: nothing beside the largest weight, which is 1 */
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (1.6666667e-1f + r * (4.1665795e-2f + r * (8.333452e-3f + r * 1.3981999e-3f)))));
    int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

#endif
