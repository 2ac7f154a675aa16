// Every fp32 logit from -2^21 to 2^20 (2.5e9 of them) through dce::term: the figures of section 3 of docs/SPEC.md.
//
//   g++ -O2 -std=c++17 -mfma -ffp-contract=off -pthread exhaustive_term.cpp -o exhaustive_term
//   ./exhaustive_term [bound, default -22.95: the largest relative error allowed is 2^bound] [threads, default 2] [stride]
//
// A stride above 1 tries every stride-th float only (a quick look; monotonicity is then over the floats tried).
// Prints the extremes and exits 1 if anything the specification promises does not hold.
//
// The reference is fp64: e^(x - n ln2), with x - n*LN2_HI exact (21 + 32 bits, and x is a multiple of 2^-25 where n is not
// 0), so that it is good to about 2^-52 for any x; it never overflows, and owes nothing to the code under test.
#include "../csrc/arith.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// Floats in order: 0x00000000.. for +0 and up, below it for -0 and down (-0 is key -1).
float from_key(int64_t key) {
    uint32_t bits = key >= 0 ? (uint32_t)key : (uint32_t)(-1 - key) | 0x80000000u;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

int64_t to_key(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits >> 31 ? -1 - (int64_t)(bits & 0x7fffffffu) : (int64_t)bits;
}

struct Point {
    int64_t P, n;
    float t;
};

Point point(float x) {
    const dce::Term term = dce::term(x);
    return {(int64_t)dce::term_significand(term), (int64_t)dce::term_exponent(term), term.t};
}

// a.P * 2^a.n <= b.P * 2^b.n, exactly: significands have 24 bits, so 32 steps of exponent settle it.
bool not_above(const Point& a, const Point& b) {
    const int64_t up = b.n - a.n;
    if (up >= 32) return true;
    if (up <= -32) return false;
    return up >= 0 ? a.P <= (b.P << up) : (a.P << -up) <= b.P;
}

// A kept term is at most 159 powers of two, 111 in x', below the row's maximum, and an unshifted row's maximum is above
// -2^20 (a shifted row's is 0). A logit below this has a term that no sum ever takes in: its error is printed, not judged.
constexpr float kLowestKept = -0x1p20f - 111;

struct Report {
    double rel = 0, ulp = 0, rounding = 0, dropped_rel = 0;
    float rel_at = 0, ulp_at = 0, rounding_at = 0, dropped_rel_at = 0;
    bool n_falls = false;
    int64_t P_min = INT64_MAX, P_max = 0, n_min = INT64_MAX, n_max = INT64_MIN;
    float t_min = 9, t_max = 0;
    int64_t tried = 0, not_monotone = 0, far_down = 0, bad_t = 0, bad_P = 0, off_by_more = 0;
    float not_monotone_at = 0;
};

constexpr double kLn2Hi = 0x1.62e42feep-1, kLn2Lo = 0x1.a39ef35793c76p-33, kLog2e = 1.4426950408889634;

void walk(int64_t from, int64_t to, int64_t stride, int64_t first, Report* out) {
    Report report;
    Point before = point(from_key(from - stride >= first ? from - stride : from));
    for (int64_t key = from; key < to; key += stride) {
        const float x = from_key(key);
        const Point now = point(x);
        ++report.tried;
        if (!not_above(before, now)) {
            if (!report.not_monotone++) report.not_monotone_at = x;
            if (!not_above({before.P - 1, before.n, 0}, now)) ++report.far_down;
        }
        if (now.n < before.n) report.n_falls = true;
        before = now;
        if (!(now.t >= 1 && now.t < 2)) ++report.bad_t;
        if (!(now.P > (1 << 22) && now.P < (1 << 24))) ++report.bad_P;
        if (now.t < report.t_min) report.t_min = now.t;
        if (now.t > report.t_max) report.t_max = now.t;
        if (now.P < report.P_min) report.P_min = now.P;
        if (now.P > report.P_max) report.P_max = now.P;
        if (now.n < report.n_min) report.n_min = now.n;
        if (now.n > report.n_max) report.n_max = now.n;

        const double n = (double)now.n;
        const double away = std::fabs(n - (double)x * kLog2e);      // how far n is from x log2 e: 0.5 if it were exact
        if (away > report.rounding) report.rounding = away, report.rounding_at = x;
        double r = std::fma(-n, kLn2Hi, (double)x);
        r = std::fma(-n, kLn2Lo, r);
        const double exact = std::exp(r);
        const double error = std::fabs((double)now.P * 0x1p-23 - exact);
        if (x < kLowestKept) {
            if (error / exact > report.dropped_rel) report.dropped_rel = error / exact, report.dropped_rel_at = x;
            continue;
        }
        if (error / exact > report.rel) report.rel = error / exact, report.rel_at = x;
        // An ulp of fp32 at the exact value: 2^-23 in [1, 2), 2^-24 in [0.5, 1).
        const double ulps = error * (exact >= 1 ? 0x1p23 : 0x1p24);
        if (ulps > report.ulp) report.ulp = ulps, report.ulp_at = x;
    }
    *out = report;
}

}  // namespace

int main(int argc, char** argv) {
    const double bound = argc > 1 ? std::atof(argv[1]) : -22.95;
    const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
    const int64_t stride = argc > 3 ? std::atoll(argv[3]) : 1;
    const int64_t first = to_key(-0x1p21f), last = to_key(0x1p20f);

    // The reference's own constants: LN2_HI + LN2_LO is ln 2 to 80 bits, told here from the machine's long double.
    if (std::fabs((double)(std::log(2.0L) - kLn2Hi) - kLn2Lo) > 0x1p-63) {
        std::printf("the reference's ln 2 is wrong\n");
        return 1;
    }

    const int64_t steps = (last - first) / stride + 1;
    std::vector<Report> reports((size_t)threads);
    std::vector<std::thread> workers;
    for (int i = 0; i < threads; ++i) {
        const int64_t from = first + steps * i / threads * stride;
        const int64_t to = i + 1 == threads ? last + 1 : first + steps * (i + 1) / threads * stride;
        workers.emplace_back(walk, from, to, stride, first, &reports[(size_t)i]);
    }
    for (auto& worker : workers) worker.join();

    Report all = reports[0];
    for (int i = 1; i < threads; ++i) {
        const Report& one = reports[(size_t)i];
        if (one.rel > all.rel) all.rel = one.rel, all.rel_at = one.rel_at;
        if (one.dropped_rel > all.dropped_rel) all.dropped_rel = one.dropped_rel, all.dropped_rel_at = one.dropped_rel_at;
        if (one.ulp > all.ulp) all.ulp = one.ulp, all.ulp_at = one.ulp_at;
        if (one.rounding > all.rounding) all.rounding = one.rounding, all.rounding_at = one.rounding_at;
        if (one.P_min < all.P_min) all.P_min = one.P_min;
        if (one.P_max > all.P_max) all.P_max = one.P_max;
        if (one.n_min < all.n_min) all.n_min = one.n_min;
        if (one.n_max > all.n_max) all.n_max = one.n_max;
        if (one.t_min < all.t_min) all.t_min = one.t_min;
        if (one.t_max > all.t_max) all.t_max = one.t_max;
        if (!all.not_monotone && one.not_monotone) all.not_monotone_at = one.not_monotone_at;
        all.tried += one.tried, all.not_monotone += one.not_monotone;
        all.far_down += one.far_down, all.n_falls |= one.n_falls;
        all.bad_t += one.bad_t, all.bad_P += one.bad_P;
    }

    std::printf("tried              %lld floats from -2^21 to 2^20\n", (long long)all.tried);
    std::printf("relative error     2^%.4f at %a\n", std::log2(all.rel), all.rel_at);
    std::printf("error in ulp       %.4f at %a\n", all.ulp, all.ulp_at);
    std::printf("never kept         2^%.4f at %a (logits below %.0f)\n", std::log2(all.dropped_rel), all.dropped_rel_at,
                kLowestKept);
    std::printf("P                  %lld .. %lld (2^%.4f .. 2^%.4f)\n", (long long)all.P_min, (long long)all.P_max,
                std::log2((double)all.P_min), std::log2((double)all.P_max));
    std::printf("t                  %a .. %a\n", all.t_min, all.t_max);
    std::printf("n                  %lld .. %lld\n", (long long)all.n_min, (long long)all.n_max);
    std::printf("|n - x log2 e|     %.6f at %a\n", all.rounding, all.rounding_at);
    std::printf("steps downwards    %lld, of them by more than one unit of P: %lld\n", (long long)all.not_monotone,
                (long long)all.far_down);

    bool good = true;
    if (all.not_monotone) std::printf("first step down    at %a\n", all.not_monotone_at);
    auto check = [&](bool holds, const char* what) {
        if (!holds) std::printf("FAILED: %s\n", what), good = false;
    };
    check(all.tried == steps, "every float was tried");
    check(all.rel <= std::exp2(bound), "the relative error is within the bound");
    check(all.bad_t == 0, "1 <= t < 2");
    check(all.bad_P == 0, "2^22 < P < 2^24");
    check(all.n_min > -(1 << 22) && all.n_max < (1 << 21), "-2^22 < n < 2^21");
    // Where floats are denser than P (about -1/4 < x < 0) the rounding of q shows: a neighbour may be one unit of P lower.
    check(all.far_down == 0, "the term is monotone to within one unit of P");
    check(!all.n_falls, "n is monotone");
    const Point zero = point(0.0f), negative = point(-0.0f);
    check(zero.P == 1 << 23 && zero.n == 0 && negative.P == 1 << 23 && negative.n == 0, "e^0 is exactly 1");
    return good ? 0 : 1;
}
